"""The arena: one memory region that daemon and workers share for embeddings.

A memfd, so nothing is left behind after kill -9.  The daemon creates it and never maps it; each worker
maps the whole and touches its own slice once at start, after binding to its NUMA node, so that the pages
lie spread over the nodes and no page fault is left for serving.  Who may use which bytes is decided by
`dispatch/leases.py`, in the daemon alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from epdd.errors import StartupError, WorkerFailed
from epdd.wire import Lease

PAGE = mmap.PAGESIZE


def create(size: int) -> int:
    """A file descriptor of `size` bytes of anonymous shared memory.  Raises StartupError."""
    try:
        fd = os.memfd_create("epdd-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
    except OSError as error:
        raise StartupError(f"arena of {size} bytes: {error.strerror}; lower arena.bytes") from None
    return fd


class Mapping:
    """A worker's view of the whole arena.

    Invariant: it is never closed.  A tensor made by torch.frombuffer does not keep the mapping alive, so
    unmapping would leave the tensor pointing at nothing.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(fd, size)
        self._fd = fd

    def reserve(self, offset: int, size: int) -> None:
        """Allocate and touch these pages now.  Raises StartupError where memory is short.

        What is free is looked at first: a memfd has no size limit of its own, so fallocate would go on until
        the kernel kills something for it.  A worker that comes back finds the pages there already.
        """
        if size == 0:
            return
        if offset < 0 or offset + size > self.size:
            raise StartupError(f"arena: [{offset}, +{size}) is outside the {self.size} bytes")
        missing = self.size - os.fstat(self._fd).st_blocks * 512
        if min(size, missing) > (free := _available_bytes()):
            raise StartupError(f"arena: {size} bytes cannot be reserved, {free} are available; lower arena.bytes")
        try:
            os.posix_fallocate(self._fd, offset, size)
        except OSError as error:
            raise StartupError(f"arena: {size} bytes cannot be reserved: {error.strerror}; lower arena.bytes") from None
        # MADV_POPULATE_WRITE (Linux 5.14) maps the pages in this process without changing a byte.
        libc = ctypes.CDLL(None, use_errno=True)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + offset
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 23)

    def view(self, lease: Lease) -> memoryview:
        """The lease's bytes, writable, not copied.  Raises WorkerFailed outside the arena."""
        if lease.offset < 0 or lease.size < 0 or lease.offset + lease.size > self.size:
            raise WorkerFailed(f"lease [{lease.offset}, +{lease.size}) is outside the arena of {self.size} bytes")
        return memoryview(self._map)[lease.offset:lease.offset + lease.size]


def _available_bytes() -> int:
    """What the kernel could give without swapping."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise StartupError("/proc/meminfo names no MemAvailable")


def slices(size: int, parts: int) -> list[tuple[int, int]]:
    """[0, size) cut into `parts` page-aligned (offset, bytes), one per encoder."""
    if parts < 1:
        return []
    step = -(-size // parts // PAGE) * PAGE
    cuts = [min(size, step * i) for i in range(parts)] + [size]
    return [(cuts[i], cuts[i + 1] - cuts[i]) for i in range(parts)]
