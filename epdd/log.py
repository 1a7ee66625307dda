"""Log lines for people and for journald: one line each, subject first, on stderr.

The daemon never waits for the reader of its logs.  Lines, and everything else it shows on a terminal, go through a
bounded queue to a thread; if the reader stops reading, lines are dropped and counted.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

LINES_MAX = 5_000           # lines in the queue, about 1 MB
CLOSE_S = 1.0               # at the end: time to write the queue; a reader that has stopped is not waited for longer

# journald reads a leading <N> as the syslog priority (sd-daemon(3)).
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


# Escapes of control characters: one record is one line, and no record can control the terminal.
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {9: "\t", 10: "\\n", 13: "\\r"}


class Output:
    """Runs functions that may block, one after another, in a thread."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(LINES_MAX)
        self._untold = 0            # dropped since the last warning about it
        self.dropped = 0
        # A daemon thread: if it hangs in a write, the process can still end.
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def later(self, work: Callable[[], None]) -> None:
        """Queue `work`, or drop it if the queue is full.  Never waits."""
        try:
            self._waiting.put_nowait(work)
        except queue.Full:
            self.dropped += 1
            self._untold += 1

    def close(self) -> bool:
        """Run what is queued and end the thread; False if that takes over CLOSE_S."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
            self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except (OSError, ValueError):
                self.dropped += 1       # stderr itself fails, so this cannot be logged
            if self._untold and self._waiting.qsize() <= 1:     # one entry may be the end mark
                self._untold = 0
                logging.getLogger(__name__).warning(
                    "log lines were dropped, their reader had stopped reading dropped=%s", self.dropped)


def write(text: str, descriptor: int) -> None:
    """Write all of `text` by the system call, since text in Python's buffers would block the process at its end.

    Raises OSError.
    """
    data = text.encode(errors="backslashreplace")
    while data:
        try:
            data = data[os.write(descriptor, data):]
        except BlockingIOError:     # another process made the shared file non-blocking
            select.select((), (descriptor,), ())


class _Formatter(logging.Formatter):
    """Time and level for a terminal; under journald, which adds them itself, only the priority prefix."""

    def __init__(self, journal: bool) -> None:
        super().__init__("%(message)s" if journal else "%(asctime)s %(levelname)-7s %(message)s")
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        # A newline in a message must not look like a second record; tracebacks keep theirs.
        text = super().format(record).translate(CONTROL if record.exc_info is None else CONTROL | {10: "\n"})
        return f"<{_PRIORITY.get(record.levelno, 6)}>{text}" if self._journal else text


class _Queued(logging.Handler):
    """Formats at once, because arguments of a record may change; `output` writes the line later."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception:       # as logging's own handlers do: the caller must not fail because of a log line
            self.handleError(record)
            return
        output().later(lambda: _to_stderr(line))


def _to_stderr(line: str) -> None:
    # While a progress bar is shown it replaces sys.stderr, and draws itself below the line.
    stream = sys.stderr
    if stream is sys.__stderr__ and stream is not None:
        write(line, stream.fileno())
    else:
        stream.write(line)


_output: Output | None = None


def output() -> Output:
    """The Output of this process, made at its first use."""
    global _output
    if _output is None:
        _output = Output()
        atexit.register(_output.close)
    return _output


def setup(level: str) -> None:
    """Send all of epdd's loggers to stderr at `level` (debug, info, warning, error)."""
    handler = _Queued()
    handler.setFormatter(_Formatter(journal="JOURNAL_STREAM" in os.environ))
    # Malformed HTTP is the client's error, and tracebacks about it do not help an operator.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    root = logging.getLogger("epdd")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())
