"""The arena: one region of shared memory for embeddings.

It is a memfd, so nothing is left behind after kill -9.  The daemon creates it and never maps it.  Each worker maps all
of it.  At its start a worker binds to its NUMA node and then touches its own slice, so that the pages are spread over
the nodes.  Then it maps the pages of the other slices, so that serving causes no page faults.  The daemon alone decides
who may use which bytes (`dispatch/encoder_cache/cache.py`).
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
PIECE = 64 << 20            # bytes reserved at a time, to report progress
COLLAPSE_S = 5.0            # time for making huge pages, which are slow to make if memory is fragmented
_MFD_HUGE_2MB = 21 << 26
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25     # Linux 5.14, 5.14 and 6.1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def create(size: int, reserved_pages: bool = False) -> int:
    """A file descriptor of `size` bytes of anonymous shared memory.  Raises StartupError.

    `reserved_pages`: use huge pages that the administrator has reserved (vm.nr_hugepages), if enough are free.
    """
    if reserved_pages:
        try:
            fd = _memfd(size, os.MFD_HUGETLB | _MFD_HUGE_2MB)
        except OSError:
            pass
        else:
            try:
                mmap.mmap(fd, size).close()     # reserves the pages for this file
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
    """The whole arena, mapped into a worker at `address`.

    Invariant: it is never unmapped.  A tensor made by torch.frombuffer does not keep the mapping alive, so after
    unmapping the tensor would point to unmapped memory.
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
        """Allocate and touch these pages now.  Raises StartupError if memory is short.

        `progress` is called with the share that is done, 0 to 1.  Free memory is checked first: a memfd has no size
        limit, so fallocate would continue until the kernel kills a process.  A restarted worker finds the pages
        allocated already.
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
        # First through the mapping: fallocate ignores madvise and would allocate small pages.
        if collapse and self._huge_pages and not self._reserved_pages:
            for at in range(offset, offset + size, HUGE):   # MADV_COLLAPSE skips ranges without any page
                self._bytes[at]
            self._advise(offset, size, _MADV_COLLAPSE)
        self._advise(offset, size, _MADV_POPULATE_WRITE)
        try:
            os.posix_fallocate(self._fd, offset, size)
        except OSError as error:
            hint = "set arena.huge_pages = false" if self._reserved_pages else "lower arena.bytes"
            raise StartupError(f"arena: {size} bytes cannot be reserved: {error.strerror}; {hint}") from None

    def populate(self) -> bool:
        """Map the pages of all slices in this process; False, and nothing done, if some are not allocated yet.

        Each worker allocates its own slice, because its memory is bound to the right NUMA node.
        """
        if self._missing > 0:
            return False
        self._advise(0, self.size, _MADV_POPULATE_READ)
        return True

    @property
    def huge_bytes(self) -> int:
        """Bytes of the arena that this process has mapped with huge pages, as the kernel reports."""
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
        """The bytes of the lease, writable, not copied.  Raises WorkerFailed if they are outside the arena."""
        if lease.arena:
            raise WorkerFailed(f"arena {lease.arena} is not the host's, and cannot be read here")
        if lease.offset < 0 or lease.size < 0 or lease.offset + lease.size > self.size:
            raise WorkerFailed(f"lease [{lease.offset}, +{lease.size}) is outside the arena of {self.size} bytes")
        return self._bytes[lease.offset:lease.offset + lease.size]

    @property
    def _missing(self) -> int:
        """Bytes that are not allocated yet."""
        return self.size - os.fstat(self._fd).st_blocks * 512

    @property
    def _reserved_pages(self) -> bool:
        """Whether the arena consists of reserved huge pages."""
        return os.fstatvfs(self._fd).f_bsize == HUGE

    def _advise(self, offset: int, size: int, advice: int) -> None:
        """madvise; if the kernel does not know the advice or forbids it, nothing changes."""
        _libc.madvise(self.address + offset, size, advice)


def _map(fd: int, size: int) -> int:
    """Map the file and return its address, a multiple of HUGE: huge pages need that."""
    failed = ctypes.c_void_p(-1).value
    # The rest of this address range takes no memory.
    room = _libc.mmap(None, size + HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if room != failed:
        address = _libc.mmap(-(-room // HUGE) * HUGE, size, mmap.PROT_READ | mmap.PROT_WRITE,
                             mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        if address != failed:
            return int(address)
    raise StartupError(f"arena: {size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}; lower arena.bytes")


def _available_bytes() -> int:
    """Bytes that the kernel can allocate without swapping."""
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
