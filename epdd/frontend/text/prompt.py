"""Turns a conversation into token ids, with every image's place, within the context.

Text from the request must never become a control token (`<|im_end|>`, `<|image_pad|>`).  Other text must give the same
ids as in transformers, with merges across the border of template and user text.  So one character of every control
token is replaced in the request's strings by a stand-in, a lone surrogate, which JSON text cannot hold.  Control tokens
in the rendered result are then the template's own.  The runs between them get their characters back and are tokenised
as plain text.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from tokenizers import Tokenizer

from epdd.checkpoint import PromptFiles
from epdd.dispatch.request import Image, Placed
from epdd.errors import BadRequest, ContextLength
from epdd.families import ModelInfo
from epdd.frontend.requests.messages import Conversation
from epdd.frontend.text.reasoning_parser import Thinking, think_tokens, thinking
from epdd.frontend.text.template import Template
from epdd.wire import Sampling

_INLINE_CHARS = 16_384      # about 10 ms of tokenising: longer prompts go to a thread
_MESSAGE_CHARS = 64         # tokenising these takes as long as the template takes for one message or part
_STEP_CHARS = 1 << 20       # searched for control tokens before other threads may run
_STAND_INS = 0xDC00         # first lone low surrogate


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]           # placeholders expanded
    spans: list[Placed] = field(default_factory=list)
    param: str = "messages"     # its field in the request
    thinking: Thinking | None = None    # of its answer; None: no reasoning

    def limit(self, sampling: Sampling, max_model_len: int) -> Sampling:
        """`sampling` with max_tokens inside the context (tokens).  Raises ContextLength if none is left."""
        room = max_model_len - len(self.tokens)
        if room < 1:
            raise _too_long(max_model_len, str(len(self.tokens)), self.param)
        # Clients send a max_tokens beyond the context to mean all of it.
        most = min(sampling.max_tokens or room, room)
        sampling = msgspec.structs.replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
        if self.thinking is None or not sampling.grammar:
            return sampling
        ids = self.thinking.tokens
        return msgspec.structs.replace(sampling, think_end_id=ids.end,
                                       think_start_id=-1 if self.thinking.begun else ids.start)

    def cut(self, truncate: int, sampling: Sampling, max_model_len: int) -> Prompt:
        """Its last `truncate` tokens; -1: as many as leave room for the answer, at least one; 0: all.

        Raises BadRequest if that would cut an image away.
        """
        if truncate < 0:
            truncate = max(1, max_model_len - (sampling.max_tokens or 1))
        first = len(self.tokens) - truncate
        if not truncate or first <= 0:
            return self
        if self.spans and self.spans[0].start <= first:     # the token before it begins the image
            raise BadRequest("truncate_prompt_tokens would cut an image away", param="truncate_prompt_tokens")
        spans = [replace(span, start=span.start - first) for span in self.spans]
        return replace(self, tokens=self.tokens[first:], spans=spans)


class PromptMaker:
    """Makes prompts by a checkpoint's tokenizer and chat template."""

    def __init__(self, family: ModelInfo, files: PromptFiles, executor: Executor, reasoning: bool = True) -> None:
        """`reasoning`: separate a thinking model's reasoning from its answer."""
        self.tokenizer = files.tokenizer
        self._family = family
        self._executor = executor
        controls = {added.content: token for token, added in self.tokenizer.get_added_tokens_decoder().items()
                    if added.special or token in family.control_ids}
        self._controls = controls
        # Longest first: if two tokens start at the same place, tokenizers take the longer.
        longest = sorted(controls, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest)) + ")")
        images = family.image_token_id, family.placeholder
        self._split_plain = re.compile("(" + "|".join(
            re.escape(content) for content in longest if controls[content] not in images) + ")")
        marked = sorted({"|" if "|" in content else content[0] for content in controls})
        self._stand_ins = [(char, chr(_STAND_INS + index)) for index, char in enumerate(marked)]
        self._chars_max = _longest_token(self.tokenizer)
        text = {token: content for content, token in controls.items()}
        self._template = Template(files.template, "".join(text[token] for token in family.template_ids))
        self._think_tokens = think_tokens(self.tokenizer, files.template.source) if reasoning else None

    async def make(self, conversation: Conversation, images: Sequence[Image], max_model_len: int) -> Prompt:
        """`images` in the order of `conversation.images`.  Raises BadRequest or ContextLength."""
        if _small(conversation):
            return self._made(conversation, images, max_model_len)
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._made, conversation, images, max_model_len)

    def _made(self, conversation: Conversation, images: Sequence[Image], max_model_len: int) -> Prompt:
        text = self._template.render(conversation, self._shielded)
        self._check(text, max_model_len, "messages")
        return self._tokenise(text, images, max_model_len)

    async def plain(self, text: str, max_model_len: int, all_chars: int = 0) -> Prompt:
        """The prompt of a text completion.  Control tokens in its text are control tokens, but image placeholders stay
        text.  `all_chars`: of all the request's prompts.  Raises ContextLength."""
        self._check(text, max_model_len, "prompt")
        if max(len(text), all_chars) < _INLINE_CHARS:
            return self._tokenise_plain(text, max_model_len)
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._tokenise_plain, text, max_model_len)

    def _check(self, text: str, max_model_len: int, param: str) -> None:
        # The length of the longest token gives a lower bound, so that far too long texts are not tokenised.
        least = len(text) // self._chars_max
        if least > max_model_len:
            raise _too_long(max_model_len, f"at least {least}", param)

    def _tokenise(self, text: str, images: Sequence[Image], max_model_len: int) -> Prompt:
        pieces = self._pieces(self._split, text, max_model_len, "messages")
        controls = [self._controls[piece] for piece in pieces[1::2]]
        if controls.count(self._family.placeholder) != len(images):
            raise BadRequest("The model's chat template cannot show every image of these messages; "
                             "images belong into user messages", param="messages")
        # The batch call releases the GIL.
        runs = self.tokenizer.encode_batch_fast(
            [self._restored(run) for run in self._with_text_around(pieces[::2], controls)], add_special_tokens=False)
        tokens: list[int] = list(runs[0].ids)
        spans: list[Placed] = []
        for token, run in zip(controls, runs[1:]):
            if token == self._family.placeholder:
                expansion = self._family.expand(images[len(spans)].grid)
                spans.append(Placed(len(tokens), len(spans), expansion.runs))
                tokens += expansion.ids
            else:
                tokens.append(token)
            tokens += run.ids
        return Prompt(tokens, spans, thinking=thinking(self._think_tokens, text))

    def _with_text_around(self, runs: list[str], controls: Sequence[int]) -> list[str]:
        """`runs`, between `controls`, with the text that the family writes around images."""
        before, after = self._family.text_around
        if before or after:
            for i, token in enumerate(controls):
                if token == self._family.placeholder:
                    runs[i], runs[i + 1] = runs[i] + before, after + runs[i + 1]
        return runs

    def _pieces(self, split: re.Pattern[str], text: str, max_model_len: int, param: str) -> list[str]:
        """Run, control, run, control, ..., run.  In steps: a search holds the interpreter, and a long text at once
        would block the event loop."""
        pieces, begun, at = list[str](), 0, 0
        while at < len(text):
            stop = at + _STEP_CHARS
            # Beyond the step, so that a token that begins within it is not found as a shorter one.
            found = split.search(text, at, stop + self._chars_max)
            if found is None or found.start() >= stop:
                at = stop
                continue
            pieces += text[begun:found.start()], found[0]
            begun = at = found.end()
            if len(pieces) > 2 * max_model_len:
                raise _too_long(max_model_len, f"at least {len(pieces) // 2}", param)
        return [*pieces, text[begun:]]

    def _tokenise_plain(self, text: str, max_model_len: int) -> Prompt:
        pieces = self._pieces(self._split_plain, text, max_model_len, "prompt")
        runs = self.tokenizer.encode_batch_fast(pieces[::2], add_special_tokens=False)
        tokens: list[int] = list(runs[0].ids)
        for piece, run in zip(pieces[1::2], runs[1:]):
            tokens.append(self._controls[piece])
            tokens += run.ids
        return Prompt(tokens, param="prompt")

    def _shielded(self, value: Any) -> Any:
        """`value` (text, or JSON holding text) with the stand-ins in every string, keys included."""
        if isinstance(value, str):
            for char, stand_in in self._stand_ins:      # str.translate takes twenty times as long
                value = value.replace(char, stand_in)
            return value
        if isinstance(value, dict):
            return {self._shielded(key): self._shielded(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._shielded(item) for item in value]
        return value

    def _restored(self, run: str) -> str:
        for char, stand_in in self._stand_ins:
            run = run.replace(stand_in, char)
        return run


def _small(conversation: Conversation) -> bool:
    """Whether rendering and tokenising it takes about 10 ms at most."""
    chars = 0
    for message in conversation.messages:
        if message.fields:      # may be large
            return False
        parts = (message.content,) if isinstance(message.content, str) else message.content
        chars += _MESSAGE_CHARS * (1 + len(parts)) + sum(len(part) for part in parts if isinstance(part, str))
        if chars > _INLINE_CHARS:
            return False
    return not conversation.tools


def _longest_token(vocabulary: Tokenizer) -> int:
    """Characters of the longest token.  Not by get_vocab(), which builds a dict of the whole vocabulary."""
    return max(len(vocabulary.id_to_token(token) or "") for token in range(vocabulary.get_vocab_size()))


def _too_long(max_model_len: int, have: str, param: str) -> ContextLength:
    return ContextLength(f"This model's maximum context length is {max_model_len} tokens. However, your {param} "
                         f"resulted in {have} tokens. Please reduce the length of the {param}.", param=param)
