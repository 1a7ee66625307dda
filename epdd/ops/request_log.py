"""The request log: a file with one JSON line for each request, if `log.requests` names it.

It has sizes and times only: no prompt, image, answer or key.  Serving never waits for it: a thread writes the lines out
of a bounded queue.  Lines that the disk does not take are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from epdd.dispatch.request_record import RequestRecord

log = logging.getLogger(__name__)

LINES_MAX = 10_000          # in the queue: 4 MB
BATCH_MAX = 256             # lines in one write
CLOSE_S = 1.0               # at stop, a disk that hangs is not waited for any longer


class RequestLog:
    """Appends to one file; at `bytes_max` it becomes FILE.1, FILE.1 becomes FILE.2, and so on up to `kept`."""

    def __init__(self, path: Path, bytes_max: int, kept: int) -> None:
        """Opens nothing: that could hang."""
        self._path = path
        self._bytes_max = bytes_max
        self._kept = kept
        self._waiting: queue.Queue[bytes | None] = queue.Queue(LINES_MAX)
        self._reopen = False
        self._complains = False             # lost lines were logged, and none was written since
        self._lock = threading.Lock()       # of `dropped`, which both threads count
        self.written = self.dropped = 0     # lines
        self._file = -1
        self._size = 0
        self._torn = False                  # the disk filled up within a line; the next line must not be appended to it
        # A daemon thread: a write that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Queue a line, or drop it.  Never waits."""
        try:
            self._waiting.put_nowait(orjson.dumps(line) + b"\n")
        except queue.Full:
            self._lost(1, "the disk is too slow, or hangs")

    def reopen(self) -> None:
        """Open the path again for the next line: the file was moved away, by logrotate for example."""
        self._reopen = True

    def close(self) -> None:
        """Write the queued lines, as many as the disk takes within CLOSE_S."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    # --- in the thread

    def _run(self) -> None:
        last = False
        while not last:
            lines = [self._waiting.get()]
            while len(lines) < BATCH_MAX and not self._waiting.empty():
                lines.append(self._waiting.get_nowait())
            last = None in lines
            if batch := [line for line in lines if line is not None]:
                self._store(batch)
        with suppress(OSError):
            self._shut()        # the reader of a pipe sees its end

    def _store(self, lines: list[bytes]) -> None:
        try:
            self._prepare(sum(map(len, lines)))
            self._append(lines)
        except OSError as error:
            self._lost(len(lines), error.strerror or str(error))
            return
        self.written += len(lines)
        if self._complains and self._waiting.empty():      # otherwise a slow disk would log this with every batch
            self._complains = False
            log.warning("request log: lines are written again dropped=%s", self.dropped)

    def _prepare(self, more: int) -> None:
        """Open the file if it is not, and rotate it if `more` bytes do not fit.  Raises OSError."""
        if self._reopen:
            self._reopen = False
            self._shut()
        if self._file >= 0 and self._size and self._size + more > self._bytes_max and self._rotates:
            self._shut()
            for number in range(self._kept, 0, -1):
                source = self._numbered(number - 1)
                if source.exists():
                    os.replace(source, self._numbered(number))
            if not self._kept:
                os.unlink(self._path)
        if self._file < 0:
            # Only for the owner: it says who asked when.
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._file).st_size
            self._torn = self._torn and self._size > 0

    @property
    def _rotates(self) -> bool:
        """Whether it has a size to limit, unlike a pipe or /dev/stderr."""
        return stat.S_ISREG(os.fstat(self._file).st_mode)

    def _append(self, lines: list[bytes]) -> None:
        data = memoryview((b"\n" if self._torn else b"") + b"".join(lines))
        try:
            while data:
                done = os.write(self._file, data)
                self._size += done
                self._torn = data[done - 1] != ord("\n")
                data = data[done:]
        except OSError:
            self._shut()
            raise

    def _shut(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path

    def _lost(self, lines: int, why: str) -> None:
        with self._lock:
            self.dropped += lines
            said, self._complains = self._complains, True
        if not said:
            log.warning("request log: lines are dropped: %s path=%s", why, self._path)


def line(record: RequestRecord) -> dict[str, Any]:
    """A request that has ended."""
    return {"time": time.time(), "id": record.id, "client_id": record.client_id, "model": record.model,
            "outcome": record.outcome, "status": record.status, "error": record.code or None,
            "prompt_tokens": record.prompt_tokens, "images": len(record.images), "answer_tokens": record.answer_tokens,
            "finish_reasons": [reason for _, reason in sorted(record.finish_reasons.items())],
            "ttft_s": record.ttft_s and round(record.ttft_s, 6), "duration_s": round(record.age(), 6)}
