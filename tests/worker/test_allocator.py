"""Memory that malloc was told to keep; in a process of its own, for the switches hold for all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes
import mmap
from epdd.worker import allocator

if not allocator.keep():
    raise SystemExit(77)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE >> 20

def use(size):
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    libc.free(block)

before = resident()
use(256 << 20)
kept = resident()
use(200 << 20)
again = resident()
allocator.give_back()
print(kept - before, again - before, resident() - before)
"""


def test_freed_memory_stays_until_it_is_given_back() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    if ended.returncode == 77:
        pytest.skip("this C library has no mallopt")
    assert ended.returncode == 0, ended.stderr
    kept, again, given_back = map(int, ended.stdout.split())
    assert kept >= 254 and abs(again - kept) <= 2 and given_back < 16
