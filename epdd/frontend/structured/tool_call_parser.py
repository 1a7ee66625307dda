"""Tool calls in an answer's text, in the form that Qwen models are trained on:

    <tool_call>
    {"name": "look", "arguments": {"at": 1}}
    </tool_call>

The grammar in `tool_schema.py` enforces these exact bytes, so the marks alone separate text and calls.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field

OPEN = "<tool_call>"
HEAD = ('\n{"name": "', '", "arguments": ')     # before and after the function's name
CLOSE = "}\n</tool_call>"                       # cannot occur in the arguments: JSON escapes line breaks
BETWEEN = "\n"                                  # from one call to the next

_HEAD = re.compile(re.escape(HEAD[0]) + r'([^"]*)' + re.escape(HEAD[1]))


@dataclass(frozen=True)
class CallDelta:
    """A text's addition to one call: id and name at its beginning, then pieces of its arguments."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass
class Parsed:
    """A text's addition to an answer."""

    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class CallParser:
    """Separates one answer's text and calls as it streams.  The result does not depend on the pieces it comes in.

    White space before a call belongs to the call, so it is held back until other text follows.  If the answer ends
    inside a call, the call keeps its arguments so far; if it ends before them, it is text.
    """

    def __init__(self) -> None:
        self.calls = 0          # that have begun
        self._held = ""
        self._step = self._text

    @property
    def inside(self) -> bool:
        """Whether the last call has not ended."""
        return self._step != self._text

    def push(self, text: str) -> Parsed:
        self._held += text
        parsed = Parsed()
        while self._step(parsed):
            pass
        return parsed

    def end(self) -> Parsed:
        """The rest, at the answer's end."""
        parsed = Parsed()
        if self._step == self._arguments:
            self._argue(parsed, len(self._held))
        elif self._step == self._head:
            parsed.text = OPEN + self._held
        elif not self.calls:
            parsed.text = self._held
        self._held = ""
        return parsed

    # Each step consumes held text and returns whether another step follows.

    def _text(self, parsed: Parsed) -> bool:
        before, mark, after = self._held.partition(OPEN)
        if mark:
            parsed.text += before.rstrip()
            self._held, self._step = after, self._head
            return True
        free = len(self._held[:len(self._held) - _begun(self._held, OPEN)].rstrip())
        parsed.text += self._held[:free]
        self._held = self._held[free:]
        return False

    def _head(self, parsed: Parsed) -> bool:
        found = _HEAD.match(self._held)
        if found is None:
            return False
        parsed.calls.append(CallDelta(self.calls, "", f"call_{uuid.uuid4().hex[:24]}", found[1]))
        self.calls += 1
        self._held, self._step = self._held[found.end():], self._arguments
        return True

    def _arguments(self, parsed: Parsed) -> bool:
        at = self._held.find(CLOSE)
        if at >= 0:
            self._argue(parsed, at)
            self._held, self._step = self._held[len(CLOSE):], self._text
            return True
        self._argue(parsed, len(self._held) - _begun(self._held, CLOSE))
        return False

    def _argue(self, parsed: Parsed, length: int) -> None:
        if length:
            parsed.calls.append(CallDelta(self.calls - 1, self._held[:length]))
            self._held = self._held[length:]


def _begun(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    sizes = range(min(len(mark) - 1, len(text)), -1, -1)
    return next(size for size in sizes if mark.startswith(text[len(text) - size:]))
