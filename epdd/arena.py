"""The arena: one memory region that daemon and workers share for embeddings.

A memfd, so nothing is left behind after kill -9.  The daemon creates it and never maps it; each worker
maps the whole and touches its own slice once at start, after binding to its NUMA node, so that the pages
lie spread over the nodes.  Then each enters the others' pages into its own page table, too, so that no page
fault is left for serving.  Who may use which bytes is decided in the daemon alone, by
`dispatch/encoder_cache/cache.py`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable

from epdd.errors import StartupError, WorkerFailed
from epdd.wire import Lease

PAGE = mmap.PAGESIZE
HUGE = 2 << 20              # bytes of a huge page on x86 and of most ARM kernels; slices are multiples of it
PIECE = 64 << 20            # reserved at a time, so that progress can be told
COLLAPSE_S = 5.0            # so long huge pages are asked for: where memory is in pieces each takes a while to make
_MFD_HUGE_2MB = 21 << 26
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25     # Linux 5.14, 5.14 and 6.1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def create(size: int, reserved_pages: bool = False) -> int:
    """A file descriptor of `size` bytes of anonymous shared memory.  Raises StartupError.

    With `reserved_pages` it is made of the huge pages that an administrator has set aside, if it gets them.
    """
    if reserved_pages:
        try:
            fd = _memfd(size, os.MFD_HUGETLB | _MFD_HUGE_2MB)
        except OSError:
            pass
        else:
            try:
                mmap.mmap(fd, size).close()     # from now on they are promised to it
                return fd
            except OSError:
                os.close(fd)
    try:
        return _memfd(size, 0)
    except OSError as error:
        raise StartupError(f"arena of {size} bytes: {error.strerror}; lower arena.bytes") from None


def _memfd(size: int, flags: int) -> int:
    fd = os.memfd_create("epdd-arena", os.MFD_CLOEXEC | flags)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


class Mapping:
    """A worker's view of the whole arena, which begins at `address`.

    Invariant: it is never unmapped.  A tensor made by torch.frombuffer does not keep the mapping alive, so
    unmapping would leave the tensor pointing at nothing.
    """

    def __init__(self, fd: int, size: int, huge_pages: bool = False) -> None:
        self.size = size
        self._fd = fd
        self._huge_pages = huge_pages
        self.address = _map(fd, size)
        self._bytes = memoryview((ctypes.c_char * size).from_address(self.address)).cast("B")
        if huge_pages:
            self._advise(0, size, mmap.MADV_HUGEPAGE)

    def reserve(self, offset: int, size: int, progress: Callable[[float], None] = lambda done: None) -> None:
        """Allocate and touch these pages now.  Raises StartupError where memory is short.

        `progress` hears of the share that is done, 0 to 1.  What is free is looked at first: a memfd has no size limit
        of its own, so fallocate would go on until the kernel kills something for it.  A worker that comes back finds
        the pages there already.
        """
        if size == 0:
            return
        if offset < 0 or offset + size > self.size:
            raise StartupError(f"arena: [{offset}, +{size}) is outside the {self.size} bytes")
        if not self._reserved_pages and min(size, self._missing) > (free := _available_bytes()):
            raise StartupError(f"arena: {size} bytes cannot be reserved, {free} are available; lower arena.bytes")
        patience = time.monotonic() + COLLAPSE_S
        for at in range(offset, offset + size, PIECE):
            piece = min(PIECE, offset + size - at)
            self._reserve(at, piece, collapse=time.monotonic() < patience)
            progress((at + piece - offset) / size)

    def _reserve(self, offset: int, size: int, collapse: bool) -> None:
        # Through the mapping first: fallocate knows no advice and would take small pages.
        if collapse and self._huge_pages and not self._reserved_pages:
            for at in range(offset, offset + size, HUGE):   # what is wholly empty is not made huge
                self._bytes[at]
            self._advise(offset, size, _MADV_COLLAPSE)
        self._advise(offset, size, _MADV_POPULATE_WRITE)
        try:
            os.posix_fallocate(self._fd, offset, size)
        except OSError as error:
            hint = "set arena.huge_pages = false" if self._reserved_pages else "lower arena.bytes"
            raise StartupError(f"arena: {size} bytes cannot be reserved: {error.strerror}; {hint}") from None

    def populate(self) -> bool:
        """Map the pages of all slices in this process; False while some are not reserved: nothing was done.

        Reserving them is for their own workers, whose memory is bound to the right NUMA nodes.
        """
        if self._missing > 0:
            return False
        self._advise(0, self.size, _MADV_POPULATE_READ)
        return True

    @property
    def huge_bytes(self) -> int:
        """How much of it this process has mapped by huge pages, as the kernel tells."""
        found, inside = 0, False
        with open("/proc/self/smaps") as file:
            for line in file:
                name, _, rest = line.partition(" ")
                if not name.endswith(":"):      # a mapping's first line: "start-end ..."
                    start, end = (int(address, 16) for address in name.split("-"))
                    inside = self.address <= start and end <= self.address + self.size
                elif inside and name in ("ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"):
                    found += int(rest.split()[0]) << 10
        return found

    def view(self, lease: Lease) -> memoryview:
        """The lease's bytes, writable, not copied.  Raises WorkerFailed outside the arena."""
        if lease.arena:
            raise WorkerFailed(f"arena {lease.arena} is not the host's, and cannot be read here")
        if lease.offset < 0 or lease.size < 0 or lease.offset + lease.size > self.size:
            raise WorkerFailed(f"lease [{lease.offset}, +{lease.size}) is outside the arena of {self.size} bytes")
        return self._bytes[lease.offset:lease.offset + lease.size]

    @property
    def _missing(self) -> int:
        """Bytes that nobody has reserved."""
        return self.size - os.fstat(self._fd).st_blocks * 512

    @property
    def _reserved_pages(self) -> bool:
        """Whether it is made of the system's reserved huge pages."""
        return os.fstatvfs(self._fd).f_bsize == HUGE

    def _advise(self, offset: int, size: int, advice: int) -> None:
        """What an older kernel does not know, or the system forbids, leaves all as it was."""
        _libc.madvise(self.address + offset, size, advice)


def _map(fd: int, size: int) -> int:
    """Where it was mapped: at a multiple of HUGE, for the kernel enters only those as huge pages."""
    failed = ctypes.c_void_p(-1).value
    # What is left around it of this room takes no memory.
    room = _libc.mmap(None, size + HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if room != failed:
        address = _libc.mmap(-(-room // HUGE) * HUGE, size, mmap.PROT_READ | mmap.PROT_WRITE,
                             mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        if address != failed:
            return int(address)
    raise StartupError(f"arena: {size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}; lower arena.bytes")


def _available_bytes() -> int:
    """What the kernel could give without swapping."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise StartupError("/proc/meminfo names no MemAvailable")


def slices(size: int, parts: int) -> list[tuple[int, int]]:
    """[0, size) cut into `parts` (offset, bytes), one per encoder; each begins at a multiple of HUGE."""
    if parts < 1:
        return []
    step = -(-size // parts // HUGE) * HUGE
    cuts = [min(size, step * i) for i in range(parts)] + [size]
    return [(cuts[i], cuts[i + 1] - cuts[i]) for i in range(parts)]
