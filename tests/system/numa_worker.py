"""The fake worker with a visible binding: memory touched after it, and a given number of threads."""

import mmap
import signal
import socket
import threading
from dataclasses import replace

from epdd.arena import Mapping
from epdd.worker.process import affinity
from tests.fleet.fake_worker import FakeWorker

TOUCHED_BYTES = 8 << 20


def main(spec, sock, arena):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    affinity.bind(spec)
    mapping = Mapping(arena.detach(), spec.arena_bytes)
    mapping.reserve(*spec.arena_slice)
    memory = touched()
    for _ in range(spec.threads - 1):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    FakeWorker(replace(spec, model="{}"), socket.socket(fileno=sock.detach()), mapping).serve()
    memory.close()


def touched():
    """Private memory with every page there."""
    memory = mmap.mmap(-1, TOUCHED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, TOUCHED_BYTES, mmap.PAGESIZE):
        memory[offset] = 1
    return memory
