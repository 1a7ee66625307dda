"""Tokens to text as they come: whole characters only, and no further than a stop string allows."""

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
    """A token stream's text.  A character is given out when its last byte is there.

    Bytes that can never become a character turn into U+FFFD, as the decoder of the whole sequence would.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special: bool, marks: Mapping[int, str] = MappingProxyType({})
                 ) -> None:
        """`marks`: what to write for certain tokens, in place of their own text."""
        self._vocabulary = vocabulary
        self._marks = marks
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def open(self) -> bool:
        """A character has begun and not ended."""
        return bool(self._utf8.getstate()[0])

    def push(self, token: int) -> str:
        if token in self._marks:
            return self.end() + self._marks[token]
        if self._skip_special and self._vocabulary.is_special(token):
            return ""
        return self._utf8.decode(self._vocabulary.bytes(token))

    def end(self) -> str:
        """What an unfinished character leaves: one replacement character, or nothing."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Holds back text that may be the beginning of a stop string.

    Of several stops the one that is complete first wins, so the result does not depend on how the text
    was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the stop string itself is free to go."""
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """Text that is free to go.  After a hit: none."""
        if self.hit or not self._stops:
            return "" if self.hit else text
        known, self._held = len(self._held), self._held + text
        # The held text was searched before: a match must end in the new part.
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

    def pass_by(self, text: str) -> str:
        """Like push, without looking for stops (below min_tokens)."""
        free, self._held = self._held + text, ""
        return free

    def end(self) -> str:
        """The held text, when the answer is over without a match."""
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
    """Text that may be sent, with the marks of the tokens that are wholly in it or before it."""

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
        self.tokens = 0         # of the answer: up to the one that completed a stop string

    @property
    def stopped(self) -> bool:
        """A stop string was found; whatever is pushed now is ignored."""
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
            text += self._stops.push(new) if self.tokens >= self._min_tokens else self._stops.pass_by(new)
        return self._piece(text)

    def end(self, stop_token: int | None = None) -> TextPiece[T]:
        """The rest, when generation is over; `stop_token`: what ended it, if that belongs to the text."""
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
