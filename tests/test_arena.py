"""The arena: mappings share their bytes, accesses outside are refused, and no page is left to be mapped."""

import os
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd import arena
from epdd.arena import HUGE
from epdd.errors import StartupError, WorkerFailed
from epdd.wire import Lease

SIZE = 4 * HUGE


def faults() -> int:
    """Pages that this process has had to map when it touched them."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize("huge_pages", [False, True])
def test_two_mappings_share_the_bytes_and_reserving_changes_none(huge_pages):
    fd = arena.create(SIZE)
    writer, reader = arena.Mapping(fd, SIZE, huge_pages), arena.Mapping(os.dup(fd), SIZE, huge_pages)
    writer.view(Lease(8192, 5))[:] = b"epdd!"
    writer.reserve(0, SIZE)
    assert writer.populate() and reader.populate()
    assert bytes(reader.view(Lease(8190, 9))) == b"\0\0epdd!\0\0"


@pytest.mark.parametrize("huge_pages", [False, True])
def test_reserved_pages_are_really_there(monkeypatch, huge_pages):
    fd = arena.create(SIZE)
    before = os.fstat(fd).st_blocks
    mapping = arena.Mapping(fd, SIZE, huge_pages)
    told: list[float] = []
    monkeypatch.setattr(arena, "PIECE", HUGE)
    mapping.reserve(HUGE, 2 * HUGE, told.append)
    assert before == 0 and os.fstat(fd).st_blocks * 512 == 2 * HUGE
    assert mapping.huge_bytes in (0, 2 * HUGE if huge_pages else 0)     # as the system allows
    assert told == [0.5, 1.0]
    assert not mapping.populate()       # other workers reserve the rest
    assert os.fstat(fd).st_blocks * 512 == 2 * HUGE


def test_no_page_is_left_to_be_mapped_by_a_reader_or_a_writer():
    fd = arena.create(SIZE)
    arena.Mapping(fd, SIZE).reserve(0, SIZE)
    other = arena.Mapping(os.dup(fd), SIZE)
    assert other.populate()
    view, pages = other.view(Lease(0, SIZE)), range(0, SIZE, arena.PAGE)
    before = faults()
    for at in pages:
        view[at] = view[at + 1]
    assert faults() - before < len(pages) // 10     # some are the test's own


@pytest.mark.parametrize("lease", [Lease(0, 4097), Lease(4096, 1), Lease(-1, 1), Lease(0, -1)])
def test_nothing_outside_the_arena(lease):
    mapping = arena.Mapping(arena.create(4096), 4096)
    with pytest.raises(WorkerFailed):
        mapping.view(lease)


def test_too_large_an_arena_says_what_to_change(monkeypatch):
    mapping = arena.Mapping(arena.create(1 << 20), 1 << 20)
    # Not with a real size: the kernel would kill a process for lack of memory.
    monkeypatch.setattr(arena, "_available_bytes", lambda: 4096)
    with pytest.raises(StartupError, match="arena.bytes"):
        mapping.reserve(0, 1 << 20)
    with pytest.raises(StartupError, match="outside"):
        mapping.reserve(4096, 1 << 20)
    with pytest.raises(StartupError, match="cannot be mapped"):
        arena.Mapping(os.dup(2), 1 << 62)


def test_pages_that_are_there_already_need_no_free_memory(monkeypatch):
    fd = arena.create(1 << 20)
    arena.Mapping(fd, 1 << 20).reserve(0, 1 << 20)
    monkeypatch.setattr(arena, "_available_bytes", lambda: 0)
    arena.Mapping(os.dup(fd), 1 << 20).reserve(4096, 1 << 19)       # a worker that starts again


def test_without_reserved_huge_pages_it_is_made_of_others():
    """If too few huge pages are reserved, none is used."""
    size = 1 << 44
    fd = arena.create(size, reserved_pages=True)
    assert os.fstat(fd).st_size == size and os.fstatvfs(fd).f_bsize == arena.PAGE
    os.close(fd)


@given(st.integers(0, 1 << 32), st.integers(1, 16))
def test_slices_cover_all_bytes_once(size, parts):
    cuts = arena.slices(size, parts)
    assert len(cuts) == parts and sum(length for _, length in cuts) == size
    assert all(offset % HUGE == 0 or length == 0 for offset, length in cuts)
    assert all(a + la == b for (a, la), (b, _) in zip(cuts, cuts[1:]))
