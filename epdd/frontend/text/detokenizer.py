"""Turns tokens into text as they stream: whole characters only, and nothing after a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

from epdd.families.vocabulary import Vocabulary

T = TypeVar("T")


class Decoder:
    """A token stream's text.  A character comes with its last byte.

    Bytes that are no character become U+FFFD, as in a decoder of the whole sequence.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special: bool, marks: Mapping[int, str] = MappingProxyType({})
                 ) -> None:
        """`marks`: token -> text to write in place of its own."""
        self._vocabulary = vocabulary
        self._marks = marks
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def open(self) -> bool:
        """Whether a character is incomplete."""
        return bool(self._utf8.getstate()[0])

    def push(self, token: int) -> str:
        if token in self._marks:
            return self.end() + self._marks[token]
        if self._skip_special and self._vocabulary.is_special(token):
            return ""
        return self._utf8.decode(self._vocabulary.bytes(token))

    def end(self) -> str:
        """U+FFFD for an incomplete character, else nothing."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Holds back text that may be the beginning of a stop string.

    Of several stops the one that is complete first counts, so the result does not depend on the pieces of text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the stop string itself is part of the text."""
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """Text that may be sent.  After a hit: none."""
        if self.hit or not self._stops:
            return "" if self.hit else text
        known, self._held = len(self._held), self._held + text
        # The held text was searched before, so a match ends in the new part.
        found = [(at + len(stop), at) for stop in self._stops
                 if (at := self._held.find(stop, max(0, known - len(stop) + 1))) >= 0]
        if found:
            self.hit = True
            end, start = min(found)
            free, self._held = self._held[:end if self._include else start], ""
            return free
        keep = self._partial()
        free, self._held = self._held[:len(self._held) - keep], self._held[len(self._held) - keep:]
        return free

    def push_unsearched(self, text: str) -> str:
        """Like push, without a search for stops (below min_tokens)."""
        free, self._held = self._held + text, ""
        return free

    def end(self) -> str:
        """The held text, at the answer's end."""
        free, self._held = self._held, ""
        return free

    def _partial(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


@dataclass(frozen=True)
class TextPiece(Generic[T]):
    """Text that may be sent, with the marks of the tokens that end in it or before it."""

    text: str
    marks: list[T]


class TextStream(Generic[T]):
    """One answer's text.  A mark (a token's logprob entry) travels with its token and is dropped with it."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = (), skip_special: bool = True,
                 min_tokens: int = 0, marks: Mapping[int, str] = MappingProxyType({}),
                 include_stop: bool = False) -> None:
        self._decoder = Decoder(vocabulary, skip_special, marks)
        self._stops = StopStrings(stops, include_stop)
        self._min_tokens = min_tokens
        self._decoded = 0       # characters
        self._sent = 0          # characters
        self._marks: deque[tuple[int, T]] = deque()     # (character at which the token ends, mark)
        self.tokens = 0         # of the answer, up to the one that completed a stop string

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; later tokens are ignored."""
        return self._stops.hit

    def push(self, tokens: Iterable[int], marks: Sequence[T] = ()) -> TextPiece[T]:
        """`marks` is empty or has one entry a token."""
        text = ""
        for index, token in enumerate(tokens):
            if self._stops.hit:
                break
            new = self._decoder.push(token)
            self.tokens += 1
            self._decoded += len(new)
            if marks:
                self._marks.append((self._decoded + self._decoder.open, marks[index]))
            text += self._stops.push(new) if self.tokens >= self._min_tokens else self._stops.push_unsearched(new)
        return self._piece(text)

    def end(self, stop_token: int | None = None) -> TextPiece[T]:
        """The rest, at the answer's end; `stop_token`: the token that ended it, if the text includes it."""
        if self._stops.hit:
            return TextPiece("", [])
        tail = ("" if stop_token is None else self._decoder.push(stop_token)) + self._decoder.end()
        self._decoded += len(tail)
        return self._piece(self._stops.push(tail) + self._stops.end())

    def _piece(self, text: str) -> TextPiece[T]:
        self._sent += len(text)
        marks = []
        while self._marks and self._marks[0][0] <= self._sent:
            marks.append(self._marks.popleft()[1])
        return TextPiece(text, marks)
