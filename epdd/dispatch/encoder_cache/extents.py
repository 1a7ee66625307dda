"""First-fit allocation of contiguous extents in [0, size), in any unit; arena leases use bytes."""

from __future__ import annotations

from bisect import bisect_left


class Extents:
    """Which parts of [0, size) are free.  Every offset and length is a multiple of `unit`."""

    def __init__(self, size: int, unit: int = 1) -> None:
        self.size = size // unit * unit
        self.unit = unit
        self._free: list[tuple[int, int]] = [(0, self.size)] if self.size else []   # sorted (start, end)

    def rounded(self, length: int) -> int:
        """`length` rounded up to whole units, at least one."""
        return max(1, -(-length // self.unit)) * self.unit

    @property
    def free(self) -> int:
        return sum(end - start for start, end in self._free)

    def take(self, length: int) -> int | None:
        """Offset of a fresh extent of `rounded(length)`, or None if no hole is large enough."""
        need = self.rounded(length)
        for i, (start, end) in enumerate(self._free):
            if end - start >= need:
                self._free[i:i + 1] = [(start + need, end)] if end - start > need else []
                return start
        return None

    def release(self, offset: int, length: int) -> None:
        """Give an extent back; neighbours merge.  A double release is a bug and asserted against."""
        start, end = offset, offset + self.rounded(length)
        i = bisect_left(self._free, (start, 0))
        assert 0 <= start and end <= self.size, "extent outside the region"
        assert i == len(self._free) or end <= self._free[i][0], "extent released twice"
        assert i == 0 or self._free[i - 1][1] <= start, "extent released twice"
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end))

    def shrink(self, offset: int, length: int, wanted: int) -> None:
        """Give the tail of an extent back."""
        keep, had = self.rounded(wanted), self.rounded(length)
        if keep < had:
            self.release(offset + keep, had - keep)
