"""Thinking models: text between `<think>` and `</think>` is reasoning, the rest is the answer.

A checkpoint thinks if its tokenizer has both tags as tokens and its chat template knows the closing one.  The tags
count only as these tokens: a model that spells them letter by letter writes text.  Some templates open the tag at the
end of the prompt, so the answer begins inside; others leave it to the model, or close it at once to turn thinking off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
# What the tags' tokens become in a decoded text: lone surrogates, which no UTF-8 can hold.
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
    """How an answer may think: `begun` where the prompt has opened the tag, else the answer's first token may."""

    tokens: ThinkTokens
    begun: bool


def think_tokens(tokenizer: Tokenizer, template: str) -> ThinkTokens | None:
    """None for a checkpoint that does not think."""
    start, end = tokenizer.token_to_id(OPEN), tokenizer.token_to_id(CLOSE)
    return None if start is None or end is None or CLOSE not in template else ThinkTokens(start, end)


def thinking(tokens: ThinkTokens | None, prompt: str) -> Thinking | None:
    """How the answer to a rendered prompt may think; None if it cannot, or the prompt has ended its thinking."""
    end = prompt.rstrip()
    return None if tokens is None or end.endswith(CLOSE) else Thinking(tokens, end.endswith(OPEN))


def with_marks(stops: Iterable[str]) -> tuple[str, ...]:
    """Stop strings, and again with the tags as marks where they hold one."""
    spellings = (each for stop in stops for each in (stop, stop.replace(OPEN, OPEN_MARK).replace(CLOSE, CLOSE_MARK)))
    return tuple(dict.fromkeys(spellings))


def with_tags(text: str) -> str:
    """Marks back to the tags they stand for."""
    return text.replace(OPEN_MARK, OPEN).replace(CLOSE_MARK, CLOSE)


class ReasoningParser:
    """Cuts one answer's text into reasoning and the rest, as it comes.  However the text was cut before, the same
    comes out.

    Line breaks around the reasoning and before the answer belong to the form, and to neither.  Only the first pair of
    tags counts; any other tag is text.
    """

    def __init__(self, begun: bool) -> None:
        self.thought = begun        # there is reasoning, even if it is empty
        self._tokens = 0            # up to the first end of thinking, itself included
        self._counted = False       # that end has come
        self._held = ""
        self._step = self._inside if begun else self._before
        self._said = False          # something other than line breaks came since the step began

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
        """(reasoning, answer) that the text adds."""
        self._held += text
        return self._step()

    def end(self) -> str:
        """What is left for the answer when it is over: the line breaks of one that is nothing else."""
        rest, self._held = self._held, ""
        return rest if self._step == self._before else ""

    # Each step takes what it can from the held text, and goes on with the next one.

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
