"""Log lines for people and for journald: one line each, subject first, on stderr.

The daemon never waits for whoever reads them.  Lines, and all else that it shows on a terminal, go through a bounded
queue to a thread of their own; if the reader stops reading, lines are dropped and counted.
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

LINES_MAX = 5_000           # that wait: 1 MB
CLOSE_S = 1.0               # at the end: for what waits; a reader that has stopped is not waited for

# journald reads a leading <N> as the syslog priority (sd-daemon(3)).
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


# One record is one line, and none steers the terminal of who reads it.
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {9: "\t", 10: "\\n", 13: "\\r"}


class Output:
    """Does things that may block, one after another, in a thread of its own."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(LINES_MAX)
        self._untold = 0            # dropped since that was last said
        self.dropped = 0
        # A daemon's thread: one that hangs in a write must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def later(self, work: Callable[[], None]) -> None:
        """Queue it, or drop it.  Never waits."""
        try:
            self._waiting.put_nowait(work)
        except queue.Full:
            self.dropped += 1
            self._untold += 1

    def close(self) -> bool:
        """Whether all that waited was done within CLOSE_S; nothing more is, from then on."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
            self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except (OSError, ValueError):
                self.dropped += 1       # nowhere is left to say that there is nowhere to say it
            if self._untold and self._waiting.qsize() <= 1:     # the one may be the end
                self._untold = 0
                logging.getLogger(__name__).warning(
                    "log lines were dropped, their reader had stopped reading dropped=%s", self.dropped)


def write(text: str, descriptor: int) -> None:
    """All of it, by the system's own call: what Python buffers would block the process again at its end.

    Raises OSError.
    """
    data = text.encode(errors="backslashreplace")
    while data:
        try:
            data = data[os.write(descriptor, data):]
        except BlockingIOError:     # another process that shares it does not want to wait there
            select.select((), (descriptor,), ())


class _Formatter(logging.Formatter):
    """Time and level for a terminal; only the priority prefix under journald, which adds the rest."""

    def __init__(self, journal: bool) -> None:
        super().__init__("%(message)s" if journal else "%(asctime)s %(levelname)-7s %(message)s")
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        # A newline in a message must not forge a second record; in a traceback it is meant.
        text = super().format(record).translate(CONTROL if record.exc_info is None else CONTROL | {10: "\n"})
        return f"<{_PRIORITY.get(record.levelno, 6)}>{text}" if self._journal else text


class _Queued(logging.Handler):
    """Formats at once, as what a record speaks of may change, and leaves the writing to `output`."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception:       # as logging's own handlers: a record that cannot be shown is not the caller's fault
            self.handleError(record)
            return
        output().later(lambda: _to_stderr(line))


def _to_stderr(line: str) -> None:
    # A progress bar on a terminal stands in for sys.stderr while it is shown, and draws itself below the line.
    stream = sys.stderr
    if stream is sys.__stderr__ and stream is not None:
        write(line, stream.fileno())
    else:
        stream.write(line)


_output: Output | None = None


def output() -> Output:
    """This process's only one, from its first use on."""
    global _output
    if _output is None:
        _output = Output()
        atexit.register(_output.close)
    return _output


def setup(level: str) -> None:
    """Send all of epdd's loggers to stderr at `level` (debug, info, warning, error)."""
    handler = _Queued()
    handler.setFormatter(_Formatter(journal="JOURNAL_STREAM" in os.environ))
    # Malformed HTTP is the client's fault, and its tracebacks tell an operator nothing.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    root = logging.getLogger("epdd")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())
