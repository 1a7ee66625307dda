"""Reads a worker's half of the checkpoint into memory while it loads, and reports how much of it is there.

A mapped file is read where it is touched, a little at a time: measured at a tenth of the disk's speed, which reading
ahead in large pieces reaches.  Nothing is copied or held: the pages are the kernel's cache, which all workers of the
machine share, and those that are there already cost next to nothing (0.1 s a GB).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from epdd import families
from epdd.checkpoint import headers
from epdd.errors import ModelError

log = logging.getLogger(__name__)

READERS = 4                     # places that are read at once; disks over a network want several
PIECE_BYTES = 8 << 20           # that a reader takes at a time
TOLD_EVERY_S = 0.25
GAP_BYTES = 1 << 20             # between two wanted tensors: a smaller gap is read too


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, end) of a file that hold tensors of the half."""

    path: Path
    start: int
    end: int


@contextmanager
def read_ahead(folder: str, role: str, told: Callable[[float], None]) -> Iterator[None]:
    """Read ahead in other threads until the body ends or all is read.

    `told` is called with the share that is in memory, 0 to 1, from one of these threads, never after the end.  If a
    checkpoint cannot be read, it is never called: the loader reports the fault.
    """
    reading = _ReadAhead(folder, role)
    ended = threading.Event()

    def tell() -> None:
        while reading.total and not ended.wait(TOLD_EVERY_S):
            told(reading.done / reading.total)

    threads = [threading.Thread(target=tell, name="weights", daemon=True),
               *(threading.Thread(target=reading.run, args=(ended,), name="weights", daemon=True)
                 for _ in range(READERS))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


class _ReadAhead:
    """Pieces, each for the next free thread."""

    def __init__(self, folder: str, role: str) -> None:
        self.done = self.total = 0      # bytes
        self._pieces: list[FileRange] = []   # the next one last
        self._lock = threading.Lock()
        try:
            wanted = parts(Path(folder), role)
        except ModelError as error:
            log.debug("%s is not read ahead: %s", folder, error)
            return
        self.total = sum(part.end - part.start for part in wanted)
        self._pieces = [FileRange(part.path, start, min(part.end, start + PIECE_BYTES))
                        for part in wanted for start in range(part.start, part.end, PIECE_BYTES)][::-1]

    def run(self, ended: threading.Event) -> None:
        with ExitStack() as stack:
            try:
                null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                stack.callback(os.close, null)
                self._run(null, ended)
            except OSError as error:
                log.debug("reading ahead ends: %s", error)

    def _run(self, null: int, ended: threading.Event) -> None:
        while not ended.is_set():
            with self._lock:
                if not self._pieces:
                    return
                piece = self._pieces.pop()
            with open(piece.path, "rb", buffering=0) as file:
                at = piece.start
                # Into the null device sendfile copies no byte: it only waits for the pages.
                while at < piece.end and (sent := os.sendfile(null, file.fileno(), at, piece.end - at)):
                    at += sent
            with self._lock:
                self.done += at - piece.start


def parts(folder: Path, role: str) -> list[FileRange]:
    """Where the tensors of a role's half lie, in order.  Raises ModelError where the weights cannot be read."""
    found: list[FileRange] = []
    family = families.at(folder)
    wanted = [tensor for name, tensor in headers.all_tensors(folder).items()
              if family.is_vision(name) == (role == "encoder")]
    for tensor in sorted(wanted, key=lambda tensor: (tensor.file, tensor.start)):
        if found and found[-1].path == tensor.file and tensor.start - found[-1].end <= GAP_BYTES:
            found[-1] = FileRange(tensor.file, found[-1].start, tensor.end)
        else:
            found.append(FileRange(tensor.file, tensor.start, tensor.end))
    return found
