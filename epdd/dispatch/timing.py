"""How long an image takes on a worker, and how much faster a GPU is: fitted at warm-up, corrected while running."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

HEARD_WEIGHT = 0.1          # how fast what is seen corrects the fit: about the last ten images count
CORRECTION_MAX = 4.0        # one observation moves the correction by at most this factor: outliers
DEFAULT_S_PER_PATCH = 1e-3  # before anything was measured


class TimeModel:
    """Seconds to encode an image of so many patches: t = (a + b * patches + c * patches^2) * correction.

    Linear layers cost b per patch, attention within an image c per pair.  `correction` follows what is seen
    while running: a worker whose CPUs are shared or throttled drifts from its warm-up.
    """

    def __init__(self, samples: Sequence[tuple[int, float]] = ()) -> None:
        self._coefficients = fit(samples)
        self.correction = 1.0

    def predict(self, patches: int) -> float:
        """Seconds for one image of `patches`."""
        a, b, c = self._coefficients
        return (a + b * patches + c * patches * patches) * self.correction

    def observe(self, patches: int, seconds: float) -> None:
        """An image of `patches` took `seconds`."""
        seen = seconds / max(self.predict(patches) / self.correction, 1e-9)
        low, high = self.correction / CORRECTION_MAX, self.correction * CORRECTION_MAX
        self.correction += HEARD_WEIGHT * (min(max(seen, low), high) - self.correction)


def fit(samples: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Non-negative (a, b, c) of the least squared relative error over (patches, seconds).

    Terms that would be negative are dropped: a model must never promise that a larger image takes less time.
    """
    usable = [(float(patches), seconds) for patches, seconds in samples if patches > 0 and seconds > 0]
    if not usable:
        return 0.0, DEFAULT_S_PER_PATCH, 0.0
    for powers in ((0, 1, 2), (1, 2), (0, 1), (1,)):
        if len(powers) > len({patches for patches, _ in usable}):
            continue
        # Dividing each row by its time makes the error relative: small images count as much as large ones.
        rows = [[patches ** power / seconds for power in powers] for patches, seconds in usable]
        solution = _least_squares(rows)
        if solution is not None and min(solution) >= 0:
            terms = dict(zip(powers, solution))
            return terms.get(0, 0.0), terms.get(1, 0.0), terms.get(2, 0.0)
    return 0.0, median(seconds / patches for patches, seconds in usable), 0.0


def _least_squares(rows: list[list[float]]) -> list[float] | None:
    """x of least |rows x - 1|^2 by the normal equations; None if they are singular.

    Three unknowns at most: numpy would be most of the daemon's memory for this alone.
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


def capability_ratio(gpu: Sequence[TimeModel], cpu: Sequence[TimeModel], patches: int) -> float | None:
    """R: how many times faster a GPU encodes an image of `patches` than a CPU worker; None without both."""
    if not gpu or not cpu:
        return None
    seconds = [median(model.predict(patches) for model in pool) for pool in (cpu, gpu)]
    return seconds[0] / seconds[1]
