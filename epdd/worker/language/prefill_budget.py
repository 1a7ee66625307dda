"""How many prompt tokens a mixed step may have: the sequences that decode wait for all of them.

The model of a step's time: the time of a step that only decodes, plus a time for each prompt token.  Both are averages
over the steps so far.
"""

from __future__ import annotations

import math

LEAST = 16          # tokens: fewer cost nearly as much, by reading the weights
SHARE = 2.0         # a step may always take this many times the time of decoding alone: prompts get half the time
WEIGHT = 0.2        # of the latest step
JUMP = 2.0          # a new measurement counts as at most this factor up or down: one late step says little


class PrefillBudget:
    """Follows one engine's steps."""

    def __init__(self, step_s: float) -> None:
        """`step_s`: seconds that a step with decoding sequences should take at most; 0: no limit."""
        self._step_s = step_s
        self._decode_s = 0.0        # of a step that only decodes; 0: not known
        self._token_s = 0.0         # of a prompt token; 0: not known

    def took(self, decoding: int, prompt: int, seconds: float) -> None:
        """A step with `decoding` sequences and `prompt` tokens was computed."""
        if not prompt:
            self._decode_s = _moved(self._decode_s, seconds)
            return
        token_s = max(seconds - (self._decode_s if decoding else 0.0), 0.0) / prompt
        self._token_s = _moved(self._token_s, token_s)

    @property
    def tokens(self) -> int | None:
        """Most prompt tokens of the next step if a sequence decodes; None: no limit."""
        if not (self._step_s and self._token_s):
            return None
        room = max(self._step_s, SHARE * self._decode_s) - self._decode_s
        return max(LEAST, math.floor(room / self._token_s))


def _moved(old: float, new: float) -> float:
    if old == 0.0:
        return new
    return old + WEIGHT * (min(max(new, old / JUMP), old * JUMP) - old)
