"""Thinking models: text between `<think>` and `</think>` is reasoning, the rest is the answer.

A checkpoint thinks if its tokenizer has both tags as tokens and its chat template has the closing one.  Only these
tokens count: tags that a model spells letter by letter are text.  Some templates open the tag at the end of the prompt,
so the answer begins inside; others leave it to the model, or close it at once to turn thinking off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
# The tags' tokens in decoded text: lone surrogates, which UTF-8 cannot hold.
OPEN_MARK, CLOSE_MARK = "\ud800", "\ud801"


@dataclass(frozen=True)
class ThinkTokens:
    """Token ids of the two tags."""

    start: int
    end: int

    @property
    def marks(self) -> dict[int, str]:
        return {self.start: OPEN_MARK, self.end: CLOSE_MARK}


@dataclass(frozen=True)
class Thinking:
    """The tags of an answer's reasoning.  `begun`: the prompt has opened it; else the answer's first token may."""

    tokens: ThinkTokens
    begun: bool


def think_tokens(tokenizer: Tokenizer, template: str) -> ThinkTokens | None:
    """None if the checkpoint does not think."""
    start, end = tokenizer.token_to_id(OPEN), tokenizer.token_to_id(CLOSE)
    return None if start is None or end is None or CLOSE not in template else ThinkTokens(start, end)


def thinking(tokens: ThinkTokens | None, prompt: str) -> Thinking | None:
    """For the answer to a rendered prompt; None if it has no reasoning, or the prompt has closed the tag."""
    end = prompt.rstrip()
    return None if tokens is None or end.endswith(CLOSE) else Thinking(tokens, end.endswith(OPEN))


def with_marks(stops: Iterable[str]) -> tuple[str, ...]:
    """Stop strings, and those that hold a tag again with marks."""
    spellings = (each for stop in stops for each in (stop, stop.replace(OPEN, OPEN_MARK).replace(CLOSE, CLOSE_MARK)))
    return tuple(dict.fromkeys(spellings))


def with_tags(text: str) -> str:
    """Text with tags in place of marks."""
    return text.replace(OPEN_MARK, OPEN).replace(CLOSE_MARK, CLOSE)


class ReasoningParser:
    """Separates one answer's reasoning and text as it streams.  The result does not depend on the pieces it comes in.

    Line breaks around the reasoning and before the answer are dropped.  Only the first pair of tags counts; any other
    tag is text.
    """

    def __init__(self, begun: bool) -> None:
        self.thought = begun        # there is reasoning, possibly empty
        self._tokens = 0            # up to and with the first closing tag
        self._counted = False       # the closing tag has come
        self._held = ""
        self._step = self._inside if begun else self._before
        self._said = False          # text other than line breaks came in this step

    def count(self, tokens: Sequence[int], end: int) -> None:
        """Tokens of the text to come; `end` is the closing tag's."""
        if not self._counted:
            self._counted = end in tokens
            self._tokens += tokens.index(end) + 1 if self._counted else len(tokens)

    @property
    def tokens(self) -> int:
        """Tokens of the reasoning, both tags included."""
        return self._tokens if self.thought else 0

    def push(self, text: str) -> tuple[str, str]:
        """The text's addition to (reasoning, answer)."""
        self._held += text
        return self._step()

    def end(self) -> str:
        """The rest, at the answer's end: line breaks, if it is nothing else."""
        rest, self._held = self._held, ""
        return rest if self._step == self._before else ""

    # Each step consumes held text and continues with the next step.

    def _before(self) -> tuple[str, str]:
        first = self._held.lstrip("\n")
        if not first:
            return "", ""
        if first[0] == OPEN_MARK:
            self.thought, self._step, self._held = True, self._inside, first
            return self._inside()
        self._step = self._after
        return self._after()

    def _inside(self) -> tuple[str, str]:
        if not self._said:
            self._held = self._held.lstrip("\n" + OPEN_MARK)
        said, mark, rest = self._held.partition(CLOSE_MARK)
        free = said.rstrip("\n")
        self._said = self._said or bool(free)
        self._held = rest if mark else said[len(free):]
        if not mark:
            return with_tags(free), ""
        self._step = self._between
        return with_tags(free), self._between()[1]

    def _between(self) -> tuple[str, str]:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._step = self._after
        return self._after()

    def _after(self) -> tuple[str, str]:
        free, self._held = self._held, ""
        return "", with_tags(free)
