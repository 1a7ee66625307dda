"""Progress of a download: bars on a terminal, else a log line at each tenth; systemd gets a status and more time."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from epdd import systemd

if TYPE_CHECKING:
    from rich.progress import TaskID

logger = logging.getLogger(__name__)

NOTIFY_S = 5.0
EXTEND_S = 300          # at each notice systemd allows the start this much longer; a stalled network fails sooner
NAME_LETTERS = 44


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


class Bars:
    """One bar for each file of a model and one for all.  A context manager; any thread may add bytes."""

    def __init__(self, model: str, total: int, done: int) -> None:
        """`total`: bytes of all files; `done`: how many of them are in the cache already."""
        self._model, self._total, self._done = model, total, done
        self._lock = threading.Lock()
        self._tenth = 10 * done // max(1, total)
        self._told = 0.0
        self.stopped = False        # True: each file ends its download at its next piece
        self._bars: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn,
                                       TimeRemainingColumn, TransferSpeedColumn)
            self._bars = Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), DownloadColumn(),
                                  TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
            self._all: TaskID = self._bars.add_task(model, total=total, completed=done)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        else:
            logger.info("downloading %s: %s, %s of it here already", self._model, size(self._total), size(self._done))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    @property
    def done(self) -> int:
        """Bytes downloaded so far, those of earlier runs included."""
        return self._done

    def began(self, name: str, total: int, done: int) -> TaskID | None:
        """Adds the bar of one file; `ended` removes it."""
        if self._bars is None:
            return None
        task: TaskID = self._bars.add_task(f"  {name[-NAME_LETTERS:]}", total=total, completed=done)
        return task

    def add(self, task: TaskID | None, count: int) -> None:
        """Counts `count` more bytes of a file; negative if bytes must be downloaded again."""
        with self._lock:
            self._done += count
            tenth, now = 10 * self._done // max(1, self._total), time.monotonic()
            tell, self._told = now > self._told + NOTIFY_S, now if now > self._told + NOTIFY_S else self._told
            passed, self._tenth = tenth > self._tenth, max(tenth, self._tenth)
        if self._bars is not None:
            self._bars.advance(self._all, count)
            if task is not None:
                self._bars.advance(task, count)
        elif passed:
            logger.info("downloading %s: %d %% of %s", self._model, 10 * tenth, size(self._total))
        if tell:
            systemd.notify(STATUS=f"downloading {self._model}: {size(self._done)} of {size(self._total)}",
                           EXTEND_TIMEOUT_USEC=EXTEND_S * 1_000_000)

    def ended(self, task: TaskID | None) -> None:
        if self._bars is not None and task is not None:
            self._bars.remove_task(task)
