"""How many prompt tokens a step takes beside sequences that decode: these wait for all of it.

A step's time is taken as what a step that only decodes takes, and so much more for each prompt token.  Both are learned
from the steps as they come.
"""

from __future__ import annotations

import math

LEAST = 16          # tokens: fewer cost nearly as much, by reading the weights
SHARE = 2.0         # a step may always take so many times what decoding alone takes: prompts get half the time
WEIGHT = 0.2        # of the latest step
JUMP = 2.0          # what a measure may change by at once, up or down: one step held up by something else says little


class PrefillBudget:
    """Follows one engine's steps."""

    def __init__(self, step_s: float) -> None:
        """`step_s`: seconds that a step with decoding sequences should take at most; 0: no limit."""
        self._step_s = step_s
        self._decode_s = 0.0        # of a step that only decodes; 0: none was seen
        self._token_s = 0.0         # more for a prompt token, likewise

    def took(self, decoding: int, prompt: int, seconds: float) -> None:
        """A step was computed, of so many decoding sequences and prompt tokens."""
        if not prompt:
            self._decode_s = _moved(self._decode_s, seconds)
            return
        token_s = max(seconds - (self._decode_s if decoding else 0.0), 0.0) / prompt
        self._token_s = _moved(self._token_s, token_s)

    @property
    def tokens(self) -> int | None:
        """Prompt tokens that the next step may hold if anybody decodes; None: as many as there are."""
        if not (self._step_s and self._token_s):
            return None
        room = max(self._step_s, SHARE * self._decode_s) - self._decode_s
        return max(LEAST, math.floor(room / self._token_s))


def _moved(old: float, new: float) -> float:
    if old == 0.0:
        return new
    return old + WEIGHT * (min(max(new, old / JUMP), old * JUMP) - old)
