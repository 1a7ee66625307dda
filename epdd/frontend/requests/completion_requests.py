"""Turns bodies of the completion endpoints (`schema.py`) into options and sampling for the pipeline.  Pure.

Rules that need more than one field, or the checkpoint, are here.  The checkpoint gives the sampling that a request
leaves out.  `Options.ignored` names fields without effect (`fields.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epdd.errors import BadRequest, NotFound
from epdd.families import ModelInfo
from epdd.frontend.requests import request_validation
from epdd.frontend.requests.inline_files import InlineLimits
from epdd.frontend.requests.messages import Conversation, conversation
from epdd.frontend.requests.schema import PROMPTS_MAX, ChatBody, CompletionBody, Generation, PixelLimits, StreamOptions
from epdd.frontend.structured import structured_output
from epdd.frontend.structured.structured_output import StructuredOutput
from epdd.wire import Sampling

TOKENS_MAX = 1 << 31        # a larger max_tokens means the same: the rest of the context
TEXT_TOKENS = 16            # max_tokens of a text completion without it, as in OpenAI's API
BAD_WORDS_CHARS_MAX = 2048  # of all together: looking up their spellings takes 0.3 s of a thread


@dataclass(frozen=True)
class Options:
    """A request's options, without its messages or prompt."""

    model: str                      # as the answer names it
    sampling: Sampling              # max_tokens 0: the rest of the context
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False      # in the text
    bad_words: tuple[str, ...] = ()
    truncate: int = 0               # last tokens of the prompt to keep; -1: as many as leave room; 0: all
    structure: StructuredOutput = StructuredOutput()
    cache_salt: str = ""
    ignored: tuple[str, ...] = ()   # names of fields without effect

    @property
    def logprobs(self) -> bool:
        return self.sampling.logprobs >= 0


@dataclass(frozen=True)
class Chat(Options):
    min_pixels: int = 0             # of each image; 0: the checkpoint's own
    max_pixels: int = 0


PromptInput = str | list[int]


def parse(body: bytes | bytearray, family: ModelInfo, models: Sequence[str], strict: bool = False,
          limits: InlineLimits = InlineLimits()) -> tuple[Chat, Conversation]:
    """A chat completion's body.  `models` are the model's names; the first is the default.

    Raises BadRequest with `param`, or NotFound for another model's name.
    """
    return chat(*request_validation.parse(body, ChatBody, strict, limits), family, models)


def chat(asked: ChatBody, ignored: tuple[str, ...], family: ModelInfo, models: Sequence[str]
         ) -> tuple[Chat, Conversation]:
    """The second half of `parse`, for the result of `request_validation.parse`."""
    model = check_model(asked.model, models)
    structure = structured_output.parse(msgspec.structs.asdict(asked))
    said = conversation(asked, structure.tools)
    low, high = pixels(asked.mm_processor_kwargs, family)
    if asked.top_logprobs and not asked.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    sampling = _sampling(asked, family, asked.max_completion_tokens or asked.max_tokens or 0,
                         (asked.top_logprobs or 0) if asked.logprobs else -1, structure.grammar)
    return Chat(**_common(asked), model=model, sampling=sampling, structure=structure, min_pixels=low,
                max_pixels=high, ignored=ignored), said


def parse_text(body: bytes | bytearray, family: ModelInfo, models: Sequence[str], strict: bool = False,
               limits: InlineLimits = InlineLimits()) -> tuple[Options, list[PromptInput]]:
    """A text completion's body.  Raises as `parse` does."""
    return text(*request_validation.parse(body, CompletionBody, strict, limits), family, models)


def text(asked: CompletionBody, ignored: tuple[str, ...], family: ModelInfo, models: Sequence[str]
         ) -> tuple[Options, list[PromptInput]]:
    """The second half of `parse_text`, for the result of `request_validation.parse`."""
    model = check_model(asked.model, models)
    structure = structured_output.parse(msgspec.structs.asdict(asked))
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise BadRequest("best_of is not supported beyond n", param="best_of")
    sampling = _sampling(asked, family, asked.max_tokens or TEXT_TOKENS,
                         -1 if asked.logprobs is None else asked.logprobs, structure.grammar)
    return (Options(**_common(asked), model=model, sampling=sampling, structure=structure, ignored=ignored),
            _prompts(asked.prompt, family))


def _prompts(prompt: str | list[int | str | list[int]], family: ModelInfo) -> list[PromptInput]:
    if isinstance(prompt, str) or {*map(type, prompt)} == {int}:      # `map` is fast: there may be a million
        prompt = [prompt]   # type: ignore[list-item]
    prompts: list[PromptInput] = []
    for item in prompt:
        if isinstance(item, int):
            raise BadRequest("prompt mixes token ids with texts or lists", param="prompt")
        if not item:
            raise BadRequest("prompt must hold at least one token", param="prompt")
        if not isinstance(item, str):
            check_ids(item, family, "prompt")
        prompts.append(item)
    if len(prompts) > PROMPTS_MAX:
        raise BadRequest(f"prompt holds {len(prompts)} prompts; at most {PROMPTS_MAX} are allowed", param="prompt")
    return prompts


def check_model(name: str | None, models: Sequence[str]) -> str:
    """The model's name in the answer.  Raises NotFound."""
    if name is None:
        return models[0]
    if name not in models:
        raise NotFound(f"The model `{name[:100]}` does not exist", code="model_not_found", param="model")
    return name


def check_ids(ids: Sequence[int], family: ModelInfo, param: str) -> None:
    """Raises BadRequest unless every id is a token of the vocabulary and none is the image placeholder."""
    if max(ids, default=0) >= family.vocab:
        raise BadRequest(f"{param} names a token id outside 0 to {family.vocab - 1}", param=param)
    if family.image_token_id in ids:
        raise BadRequest(f"{param} holds the image placeholder; images belong into chat messages", param=param)


def pixels(limits: PixelLimits | None, family: ModelInfo) -> tuple[int, int]:
    """min_pixels and max_pixels as requested, within the checkpoint's own limits; 0: the checkpoint's."""
    low, high = (limits.min_pixels or 0, limits.max_pixels or 0) if limits else (0, 0)
    if low and high and low > high:
        raise BadRequest(f"mm_processor_kwargs: min_pixels ({low}) is over max_pixels ({high})",
                         param="mm_processor_kwargs.min_pixels")
    low, high = (min(max(value, family.min_pixels), family.max_pixels) if value else 0 for value in (low, high))
    return low, high


def _common(asked: Generation) -> dict[str, Any]:
    """The fields of Options that need no more than a look."""
    if asked.stream_options is not None and not asked.stream:
        raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")
    options = asked.stream_options or StreamOptions()
    stop = asked.stop
    if asked.truncate_prompt_tokens == 0:
        raise BadRequest("truncate_prompt_tokens is 0; it must be at least 1, or -1", param="truncate_prompt_tokens")
    if asked.bad_words and sum(map(len, asked.bad_words)) > BAD_WORDS_CHARS_MAX:
        raise BadRequest(f"bad_words have over {BAD_WORDS_CHARS_MAX} characters together", param="bad_words")
    return {
        "n": asked.n or 1,
        "stop": () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        "stream": bool(asked.stream),
        "include_usage": bool(options.include_usage),
        "continuous_usage": bool(options.continuous_usage_stats),
        "cache_salt": asked.cache_salt or "",
        "skip_special_tokens": asked.skip_special_tokens is not False,
        "include_stop": bool(asked.include_stop_str_in_output or asked.no_stop_trim),
        "bad_words": tuple(asked.bad_words or ()),
        "truncate": asked.truncate_prompt_tokens or 0,
    }


def _sampling(asked: Generation, family: ModelInfo, max_tokens: int, logprobs: int,
              grammar: str = "") -> Sampling:
    """`max_tokens` 0: the rest of the context.  `logprobs` -1: none, else how many of the most likely tokens."""
    defaults = family.defaults
    min_tokens = asked.min_tokens or 0
    if max_tokens and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens ({min_tokens}) is over max_tokens ({max_tokens})", param="min_tokens")
    return Sampling(
        max_tokens=min(max_tokens, TOKENS_MAX), min_tokens=min(min_tokens, TOKENS_MAX),
        temperature=_first(asked.temperature, defaults.temperature),
        top_p=_first(asked.top_p, defaults.top_p),
        top_k=max(0, _first(asked.top_k, defaults.top_k)),      # vLLM's -1 is 0 here: all
        min_p=_first(asked.min_p, 0.0),
        repetition_penalty=_first(asked.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_first(asked.presence_penalty, 0.0),
        frequency_penalty=_first(asked.frequency_penalty, 0.0),
        seed=None if asked.seed == -1 else asked.seed,      # llama.cpp's and SGLang's -1 means any
        logit_bias=_logit_bias(asked.logit_bias or {}, family.vocab),
        logprobs=logprobs,
        ignore_eos=bool(asked.ignore_eos),
        grammar=grammar,
        stop_token_ids=_ids(asked.stop_token_ids or [], family.vocab, "stop_token_ids"),
        allowed_token_ids=_ids(asked.allowed_token_ids or [], family.vocab, "allowed_token_ids"),
    )


def _first(asked: Any, default: Any) -> Any:
    return default if asked is None else asked


def _ids(ids: list[int], vocab: int, param: str) -> tuple[int, ...]:
    if max(ids, default=0) >= vocab:
        raise BadRequest(f"{param} must be token ids from 0 to {vocab - 1}", param=param)
    return tuple(ids)


def _logit_bias(asked: dict[str, float], vocab: int) -> dict[int, float]:
    for key in asked:
        # str.isdecimal alone also accepts other scripts' digits, and long keys take time.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab):
            raise BadRequest(f"logit_bias names a token id outside 0 to {vocab - 1}", param="logit_bias")
    return {int(key): value for key, value in asked.items()}
