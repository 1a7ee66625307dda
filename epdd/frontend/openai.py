"""The body of `POST /v1/chat/completions`: JSON to types, with every rule a field has.  Pure.

null means absent; what a request leaves out of its sampling is as the checkpoint says.  Unknown fields are ignored and
named in `Chat.unknown`; a field that would change the answer but cannot be honoured is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import orjson

from epdd.errors import BadRequest, NotFound
from epdd.families import Family
from epdd.frontend import structured
from epdd.frontend.messages import Conversation, parse_messages
from epdd.frontend.structured import Structure
from epdd.wire import Sampling

ELEMENTS_MAX = 1_000_000    # of the JSON: each takes up to 60 times its bytes in memory
N_MAX = 8                   # answers of one request
TOP_LOGPROBS_MAX = 20       # OpenAI's own
STOPS_MAX = 16              # OpenAI allows 4; each is searched for after every token
STOP_CHARS_MAX = 256
STOP_IDS_MAX = 128
LOGIT_BIAS_MAX = 1024
TOKENS_MAX = 1 << 31        # a larger max_tokens means the same: the rest of the context

# Accepted and without effect: they do not change what a single self-hosted model answers.
_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity",
    "prediction", "reasoning_effort", "web_search_options",
})

# They ask for another answer than the one they would get.
_REFUSED = (
    "audio", "chat_template", "functions", "function_call", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "media_io_kwargs", "structured_outputs",
)

_TEMPLATE_OPTIONS = ("add_vision_id", "enable_thinking")    # booleans that Qwen templates know

_KNOWN = _IGNORED | frozenset(_REFUSED) | frozenset({
    "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "logit_bias",
    "logprobs", "top_logprobs", "n", "stream", "stream_options", "ignore_eos", "min_tokens", "skip_special_tokens",
    "mm_processor_kwargs", "response_format", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
    "modalities",
})

_Json = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """How a chat request wants to be answered; what it says is in its Conversation."""

    model: str                      # as the answer names it
    sampling: Sampling              # max_tokens 0: the rest of the context
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    skip_special_tokens: bool = True
    structure: Structure = Structure()
    min_pixels: int = 0             # of each image; 0: the checkpoint's own
    max_pixels: int = 0
    unknown: tuple[str, ...] = ()   # names of fields nobody knows

    @property
    def logprobs(self) -> bool:
        return self.sampling.logprobs >= 0


def parse(body: bytes | bytearray, family: Family, model_name: str) -> tuple[Chat, Conversation]:
    """Raises BadRequest with `param`, or NotFound for another model's name."""
    # Text and base64 of real requests hold few of these marks; a body of nothing else would fill the memory.
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > ELEMENTS_MAX:
        raise BadRequest(f"The body has over {ELEMENTS_MAX} JSON elements")
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # The decoder's message holds no input, only what is wrong and where.
        raise BadRequest(f"The body is not valid JSON: {error.msg} (byte {error.pos})") from None
    if not isinstance(data, dict):
        raise BadRequest("The body must be a JSON object")
    _check_model(data, model_name)
    _check_refused(data)
    structure = structured.parse(data)
    conversation = Conversation(parse_messages(data.get("messages")), structure.tools, _template_options(data))
    return _chat(data, family, model_name, structure), conversation


def _chat(data: _Json, family: Family, model_name: str, structure: Structure) -> Chat:
    stream = _flag(data, "stream")
    options = _object(data, "stream_options")
    if data.get("stream_options") is not None and not stream:
        raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")
    low, high = _pixels(data, family)
    return Chat(
        model=model_name,
        sampling=_sampling(data, family, structure.grammar),
        n=cast(int, _number(data, "n", int, 1, N_MAX, 1)),
        stop=_stop(data),
        stream=stream,
        include_usage=_flag(options, "include_usage", "stream_options.include_usage"),
        continuous_usage=_flag(options, "continuous_usage_stats", "stream_options.continuous_usage_stats"),
        skip_special_tokens=_flag(data, "skip_special_tokens", default=True),
        structure=structure,
        min_pixels=low, max_pixels=high,
        unknown=tuple(sorted(data.keys() - _KNOWN)),
    )


def _sampling(data: _Json, family: Family, grammar: str) -> Sampling:
    defaults = family.defaults
    max_tokens = _number(data, "max_tokens", int, 1, None, 0)
    max_tokens = _number(data, "max_completion_tokens", int, 1, None, max_tokens)
    min_tokens = _number(data, "min_tokens", int, 0, None, 0)
    if max_tokens and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens ({min_tokens}) is over max_tokens ({max_tokens})", param="min_tokens")
    top_p = _number(data, "top_p", float, 0, 1, defaults.top_p)
    if top_p == 0:
        raise BadRequest("top_p must be over 0; temperature 0 asks for the most likely token", param="top_p")
    return Sampling(
        max_tokens=min(int(max_tokens), TOKENS_MAX), min_tokens=min(int(min_tokens), TOKENS_MAX),
        temperature=_number(data, "temperature", float, 0, 2, defaults.temperature),
        top_p=top_p,
        top_k=max(0, int(_number(data, "top_k", int, -1, None, defaults.top_k))),    # vLLM's -1 is our 0: all
        min_p=_number(data, "min_p", float, 0, 1, 0.0),
        repetition_penalty=_number(data, "repetition_penalty", float, 0.01, 10, defaults.repetition_penalty),
        presence_penalty=_number(data, "presence_penalty", float, -2, 2, 0.0),
        frequency_penalty=_number(data, "frequency_penalty", float, -2, 2, 0.0),
        seed=_seed(data),
        logit_bias=_logit_bias(data, family.vocab),
        logprobs=_logprobs(data),
        ignore_eos=_flag(data, "ignore_eos"),
        grammar=grammar,
        stop_token_ids=_stop_ids(data, family.vocab),
    )


def _check_model(data: _Json, model_name: str) -> None:
    name = data.get("model")
    if name is None or name == model_name:
        return
    if not isinstance(name, str):
        raise BadRequest("model must be a string", param="model")
    raise NotFound(f"The model `{name[:100]}` does not exist", code="model_not_found", param="model")


def _check_refused(data: _Json) -> None:
    for name in _REFUSED:
        if data.get(name) is not None:
            raise BadRequest(f"{name} is not supported", param=name)
    modalities = data.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise BadRequest("modalities must be [\"text\"]", param="modalities")


def _template_options(data: _Json) -> _Json:
    options = _object(data, "chat_template_kwargs")
    for name, value in options.items():
        where = f"chat_template_kwargs.{name[:100]}"
        if name not in _TEMPLATE_OPTIONS:
            raise BadRequest(f"chat_template_kwargs allows {' and '.join(_TEMPLATE_OPTIONS)} only", param=where)
        if not isinstance(value, bool):
            raise BadRequest(f"{where} must be true or false", param=where)
    return options


def _pixels(data: _Json, family: Family) -> tuple[int, int]:
    """min_pixels and max_pixels as asked, kept inside what the checkpoint was made for."""
    options = _object(data, "mm_processor_kwargs")
    for name in options:
        if name not in ("min_pixels", "max_pixels"):
            raise BadRequest("mm_processor_kwargs allows min_pixels and max_pixels only",
                             param=f"mm_processor_kwargs.{name[:100]}")
    low, high = (int(_number(options, name, int, 1, None, 0, f"mm_processor_kwargs.{name}"))
                 for name in ("min_pixels", "max_pixels"))
    if low and high and low > high:
        raise BadRequest(f"mm_processor_kwargs: min_pixels ({low}) is over max_pixels ({high})",
                         param="mm_processor_kwargs.min_pixels")
    low, high = (min(max(value, family.min_pixels), family.max_pixels) if value else 0 for value in (low, high))
    return low, high


def _stop(data: _Json) -> tuple[str, ...]:
    value = data.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise BadRequest("stop must be a string or a list of strings", param="stop")
    if len(stops) > STOPS_MAX:
        raise BadRequest(f"stop holds {len(stops)} strings; at most {STOPS_MAX} are allowed", param="stop")
    if not all(0 < len(stop) <= STOP_CHARS_MAX for stop in stops):
        raise BadRequest(f"each stop must have 1 to {STOP_CHARS_MAX} characters", param="stop")
    return tuple(stops)


def _stop_ids(data: _Json, vocab: int) -> tuple[int, ...]:
    value = data.get("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < vocab for token in value):
        raise BadRequest(f"stop_token_ids must be a list of token ids from 0 to {vocab - 1}", param="stop_token_ids")
    if len(value) > STOP_IDS_MAX:
        raise BadRequest(f"stop_token_ids holds {len(value)} ids; at most {STOP_IDS_MAX} are allowed",
                         param="stop_token_ids")
    return tuple(value)


def _logit_bias(data: _Json, vocab: int) -> dict[int, float]:
    value = _object(data, "logit_bias")
    if len(value) > LOGIT_BIAS_MAX:
        raise BadRequest(f"logit_bias holds {len(value)} tokens; at most {LOGIT_BIAS_MAX} are allowed",
                         param="logit_bias")
    bias: dict[int, float] = {}
    for key in value:
        # str.isdecimal alone also accepts other scripts' digits, and a long run of them costs time.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab):
            raise BadRequest(f"logit_bias names a token id outside 0 to {vocab - 1}", param="logit_bias")
        bias[int(key)] = _number(value, key, float, -100, 100, 0.0, f"logit_bias.{key}")
    return bias


def _logprobs(data: _Json) -> int:
    """Sampling.logprobs: -1 for none, else how many of the best to name."""
    wanted = _flag(data, "logprobs")
    top = _number(data, "top_logprobs", int, 0, TOP_LOGPROBS_MAX, 0)
    if top and not wanted:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return int(top) if wanted else -1


def _seed(data: _Json) -> int | None:
    if data.get("seed") is None:
        return None
    return int(_number(data, "seed", int, -(1 << 63), (1 << 63) - 1, 0))


def _flag(data: _Json, name: str, where: str = "", default: bool = False) -> bool:
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"{where or name} must be true or false", param=where or name)
    return value


def _object(data: _Json, name: str) -> _Json:
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object", param=name)
    return value


def _number(data: _Json, name: str, kind: type, low: float, high: float | None, default: float,
            where: str = "") -> Any:
    """`data[name]` if it is a number of this kind in [low, high]; `default` if it is absent or null."""
    value = data.get(name)
    if value is None:
        return default
    where = where or name
    # bool is an int to Python, and a whole float is no int to the API.
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise BadRequest(f"{where} must be {'an integer' if kind is int else 'a number'}", param=where)
    if value < low or high is not None and value > high:
        rule = f"at least {low}" if high is None else f"from {low} to {high}"
        raise BadRequest(f"{where} is {str(value)[:30]}; it must be {rule}", param=where)
    return kind(value)
