"""Bounds the time of parsing a JSON text."""

from __future__ import annotations

from epdd.errors import BadRequest

WORK_MAX = 3_200_000        # sum of the weights below: 40 ms of parsing
# Objects and lists cost the most, then names of fields; a number is cheap.  Marks inside strings count too: log lines
# or JSON that fill a context of 256,000 tokens stay below the limit.
_WEIGHTS = ((b"[", 36), (b"{", 36), (b":", 12), (b'"', 4), (b'\\"', -4), (b",", 6))


def check(text: bytes | bytearray, what: str) -> None:
    """Raises BadRequest if parsing the JSON would hold the interpreter, and so the event loop, for over 40 ms."""
    if sum(weight * text.count(mark) for mark, weight in _WEIGHTS) > WORK_MAX:
        raise BadRequest(f"{what} has too many JSON elements")
