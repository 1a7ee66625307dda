"""glibc's malloc, told to keep what layers give back and take again.

Left alone it asks the kernel for each large buffer anew, and a fresh page of 4 KiB costs a fault: 7 % of a vision
tower's time on a fast CPU.  What is kept goes back when the worker has had nothing to do for a while.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4       # malloc.h


def keep() -> bool:
    """From now on freed memory stays with this process; False where the C library has no such switch."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def give_back() -> None:
    """Return to the kernel all pages that hold nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
