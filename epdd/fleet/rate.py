"""Events a second: the one definition behind every rate that is shown."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW_S = 10


class Rate:
    """Events a second over the last `window_s` whole seconds, or since its beginning."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, window_s: int = _WINDOW_S) -> None:
        self._clock = clock
        self._window_s = window_s
        self._born = int(clock())
        self._seconds: deque[list[int]] = deque(maxlen=window_s + 1)     # [second, events]

    def add(self, events: int) -> None:
        now = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append([now, 0])
        self._seconds[-1][1] += events

    def value(self) -> float:
        """The current second is not over, so it does not count."""
        now = int(self._clock())
        span = min(self._window_s, now - self._born)
        return sum(n for second, n in self._seconds if now - span <= second < now) / span if span else 0.0

    def events(self) -> int:
        """How many came in the window; those of the current second too."""
        first = int(self._clock()) - self._window_s
        return sum(n for second, n in self._seconds if second >= first)
