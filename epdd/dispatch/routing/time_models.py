"""Predicts how long an image takes on a worker: fitted at warm-up, corrected while running."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

OBSERVATIONS_MAX = 5        # images whose median corrects the fit: it ignores two outliers among them
OBSERVATION_S = 300.0       # older images are forgotten: the machine's load may have changed
OBSERVATIONS_MIN = 3        # with fewer images than this, the fit itself fills up the median
DEFAULT_S_PER_PATCH = 1e-3  # without any measurement
SLOW_FACTOR = 1.5           # a worker that is slower than its fit by this,
SLOW_AFTER_S = 30.0         # for this long, counts as slow


class TimeModel:
    """Seconds to encode an image: t = (a + b * patches + c * patches^2) * correction.

    Linear layers cost b per patch, attention within an image c per pair.  `correction` is the median of measured over
    fitted seconds of the last images: it adapts to CPUs that are shared or throttled.  Times (`now`) are seconds of any
    clock that only goes forward.
    """

    def __init__(self, samples: Sequence[tuple[int, float]] = ()) -> None:
        self._fit = fit(samples)
        self._observed: deque[tuple[float, float]] = deque(maxlen=OBSERVATIONS_MAX)      # (when, measured over fitted)
        self._slow_since: float | None = None
        self.correction = 1.0

    def predict(self, patches: int) -> float:
        """Seconds for one image of `patches`."""
        a, b, c = self._fit
        return (a + (b + c * patches) * patches) * self.correction

    def observe(self, patches: int, seconds: float, now: float) -> None:
        """An image of `patches` took `seconds`."""
        a, b, c = self._fit
        self._observed.append((now, seconds / max(a + (b + c * patches) * patches, 1e-9)))
        self.forget(now)

    def forget(self, now: float) -> None:
        """Drop old measurements: without recent ones the fit counts alone, so a slow worker gets work again."""
        while self._observed and self._observed[0][0] < now - OBSERVATION_S:
            self._observed.popleft()
        ratios = [ratio for _, ratio in self._observed]
        self.correction = median(ratios + [1.0] * (OBSERVATIONS_MIN - len(ratios)))
        if self.correction < SLOW_FACTOR:
            self._slow_since = None
        elif self._slow_since is None:
            self._slow_since = now

    def slow(self, now: float) -> bool:
        """Whether the worker has been SLOW_FACTOR slower than its fit for SLOW_AFTER_S."""
        return self._slow_since is not None and now - self._slow_since >= SLOW_AFTER_S


def fit(samples: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Non-negative (a, b, c) of the least squared relative error over (patches, seconds).

    Negative terms are dropped: a model must never predict that a larger image takes less time.
    """
    usable = [(float(patches), seconds) for patches, seconds in samples if patches > 0 and seconds > 0]
    if not usable:
        return 0.0, DEFAULT_S_PER_PATCH, 0.0
    for powers in ((0, 1, 2), (1, 2), (0, 1), (1,)):
        if len(powers) > len({patches for patches, _ in usable}):
            continue
        # Each row is divided by its time, so the error is relative: small images count as much as large ones.
        rows = [[patches ** power / seconds for power in powers] for patches, seconds in usable]
        solution = _least_squares(rows)
        if solution is not None and min(solution) >= 0:
            terms = dict(zip(powers, solution))
            return terms.get(0, 0.0), terms.get(1, 0.0), terms.get(2, 0.0)
    return 0.0, median(seconds / patches for patches, seconds in usable), 0.0


def _least_squares(rows: list[list[float]]) -> list[float] | None:
    """x of least |rows x - 1|^2 by the normal equations; None if they are singular.

    Three unknowns at most: for these, numpy would cost more memory than the rest of the daemon.
    """
    width = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) for i in range(width)]
    scaled = [[value / scale[i] for i, value in enumerate(row)] for row in rows]
    system = [[sum(row[i] * row[j] for row in scaled) for j in range(width)] + [sum(row[i] for row in scaled)]
              for i in range(width)]
    for column in range(width):
        pivot = max(range(column, width), key=lambda row: abs(system[row][column]))
        if abs(system[pivot][column]) < 1e-12:
            return None
        system[column], system[pivot] = system[pivot], system[column]
        for row in range(width):
            if row != column:
                factor = system[row][column] / system[column][column]
                system[row] = [value - factor * top for value, top in zip(system[row], system[column])]
    return [system[i][width] / system[i][i] / scale[i] for i in range(width)]
