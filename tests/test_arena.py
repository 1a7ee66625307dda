"""The arena: what one mapping writes the other reads, and nothing is reachable outside it."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd import arena
from epdd.errors import StartupError, WorkerFailed
from epdd.wire import Lease


def test_two_mappings_share_the_bytes_and_reserving_changes_none():
    fd = arena.create(1 << 20)
    writer, reader = arena.Mapping(fd, 1 << 20), arena.Mapping(os.dup(fd), 1 << 20)
    writer.view(Lease(8192, 5))[:] = b"epdd!"
    writer.reserve(0, 1 << 20)
    assert bytes(reader.view(Lease(8190, 9))) == b"\0\0epdd!\0\0"


def test_reserved_pages_are_really_there():
    fd = arena.create(4 << 20)
    before = os.fstat(fd).st_blocks
    arena.Mapping(fd, 4 << 20).reserve(1 << 20, 2 << 20)
    assert before == 0 and os.fstat(fd).st_blocks * 512 == 2 << 20


@pytest.mark.parametrize("lease", [Lease(0, 4097), Lease(4096, 1), Lease(-1, 1), Lease(0, -1)])
def test_nothing_outside_the_arena(lease):
    mapping = arena.Mapping(arena.create(4096), 4096)
    with pytest.raises(WorkerFailed):
        mapping.view(lease)


def test_too_large_an_arena_says_what_to_change(monkeypatch):
    mapping = arena.Mapping(arena.create(1 << 20), 1 << 20)
    # Never by a real size: reserving more than there is would have the kernel kill something for it.
    monkeypatch.setattr(arena, "_available_bytes", lambda: 4096)
    with pytest.raises(StartupError, match="arena.bytes"):
        mapping.reserve(0, 1 << 20)
    with pytest.raises(StartupError, match="outside"):
        mapping.reserve(4096, 1 << 20)


def test_pages_that_are_there_already_need_no_free_memory(monkeypatch):
    fd = arena.create(1 << 20)
    arena.Mapping(fd, 1 << 20).reserve(0, 1 << 20)
    monkeypatch.setattr(arena, "_available_bytes", lambda: 0)
    arena.Mapping(os.dup(fd), 1 << 20).reserve(4096, 1 << 19)       # a worker that comes back


@given(st.integers(0, 1 << 24), st.integers(1, 16))
def test_slices_cover_all_bytes_once(size, parts):
    cuts = arena.slices(size, parts)
    assert len(cuts) == parts and sum(length for _, length in cuts) == size
    assert all(offset % arena.PAGE == 0 or length == 0 for offset, length in cuts)
    assert all(a + la == b for (a, la), (b, _) in zip(cuts, cuts[1:]))
