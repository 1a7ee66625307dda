"""Extents against a model of cells: taken ranges are disjoint, released ones are free again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd.dispatch.encoder_cache.extents import Extents

steps = st.lists(st.tuples(st.sampled_from(["take", "release", "shrink"]), st.integers(1, 40),
                           st.integers(0, 10)), max_size=60)


def largest(extents):
    """The longest hole."""
    return max((end - start for start, end in extents._free), default=0)


@given(steps, st.integers(1, 8))
def test_never_overlaps_and_loses_nothing(steps, unit):
    extents, taken = Extents(100, unit), []
    for action, length, pick in steps:
        if action == "take":
            offset = extents.take(length)
            if offset is None:
                assert largest(extents) < extents.rounded(length)
            else:
                taken.append([offset, length])
        elif taken:
            item = taken[pick % len(taken)]
            if action == "release":
                extents.release(*item)
                taken.remove(item)
            elif action == "shrink" and length < item[1]:
                extents.shrink(*item, length)
                item[1] = length
        cells = [cell for offset, length in taken for cell in range(offset, offset + extents.rounded(length))]
        assert len(cells) == len(set(cells)) and all(0 <= cell < extents.size for cell in cells)
        assert extents.free == extents.size - len(cells)
    for item in taken:
        extents.release(*item)
    assert largest(extents) == extents.size


def test_release_twice_is_caught():
    extents = Extents(10)
    offset = extents.take(4)
    extents.release(offset, 4)
    with pytest.raises(AssertionError):
        extents.release(offset, 4)
