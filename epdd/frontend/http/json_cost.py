"""What parsing a JSON text may cost."""

from __future__ import annotations

from epdd.errors import BadRequest

WORK_MAX = 3_200_000        # what parsing may cost, by the weights below: 40 ms
# Objects and lists cost the most, names of objects next; a number is cheap.  Marks inside text count as well: log lines
# or JSON that fill a context of 256,000 tokens stay below the limit.
_WEIGHTS = ((b"[", 36), (b"{", 36), (b":", 12), (b'"', 4), (b'\\"', -4), (b",", 6))


def check(text: bytes | bytearray, what: str) -> None:
    """Raises BadRequest if parsing the JSON would hold the interpreter, and with it the event loop, for long."""
    if sum(weight * text.count(mark) for mark, weight in _WEIGHTS) > WORK_MAX:
        raise BadRequest(f"{what} has too many JSON elements")
