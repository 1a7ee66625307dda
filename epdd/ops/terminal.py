"""For a daemon started by hand: progress bars while it loads, then commands for a first request."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from epdd import log
from epdd.families import DEMO
from epdd.fleet.worker import State, Worker

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

QUESTION = "What colour is the circle?"
SAMPLE = DEMO / "samples" / "red-circle.png"


class Progress:
    """A bar for each worker on a terminal; nothing elsewhere (the log and epdctl have the same)."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        if self._shown:
            log.output().later(self._begin)

    def show(self, workers: Sequence[Worker]) -> None:
        """Bring the bars up to date."""
        if self._shown:
            rows = [(worker.name, 1.0 if worker.state is State.READY else worker.loading.done,
                     worker.loading.stage if worker.state is State.STARTING else worker.state.value.lower())
                    for worker in workers]
            log.output().later(lambda: self._draw(rows))

    def stop(self) -> None:
        if self._shown:
            self._shown = False
            log.output().later(self._end)

    # --- in the thread that writes the log: Ctrl-S stops a terminal's output

    def _begin(self) -> None:
        # Imported here: rich is a tenth of the daemon's memory, and a service has no terminal.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        self._bars = Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
                              TextColumn("{task.fields[stage]}"), console=Console(stderr=True), transient=True)
        self._bars.start()

    def _draw(self, rows: Sequence[tuple[str, float, str]]) -> None:
        if self._bars is not None:
            for name, done, stage in rows:
                if name not in self._tasks:
                    self._tasks[name] = self._bars.add_task(name, total=1.0, stage="")
                self._bars.update(self._tasks[name], completed=done, stage=stage)

    def _end(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def greet(model: str, host: str, port: int, socket: Path, keyed: bool) -> None:
    """Print commands that can be pasted into a shell; nothing under systemd.

    `keyed`: the commands take an API key from EPDD_API_KEY.
    """
    if "JOURNAL_STREAM" in os.environ or "NOTIFY_SOCKET" in os.environ:
        return
    address = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    sample = _shortest(SAMPLE)
    url = f"http://{address}:{port}/v1/chat/completions"
    command = _shortest(Path(sys.executable).parent / "epdctl")
    image = f'{{"type":"image_url","image_url":{{"url":"data:image/png;base64,\'$(base64 -w0 {sample})\'"}}}}'
    text = f'{{"type":"text","text":"{QUESTION}"}}'
    key = ' -H "Authorization: Bearer $EPDD_API_KEY"' if keyed else ""
    hint = " (with a key in EPDD_API_KEY)" if keyed else ""
    lines = f"""
epdd serves {model}.  Open http://{address}:{port}/ in a browser, or try{hint}:

  {command} --socket {socket} chat -i {sample} "{QUESTION}"

  curl -s {url}{key} -H 'Content-Type: application/json' -d \\
    '{{"messages":[{{"role":"user","content":[{image},{text}]}}]}}'

"""
    # Another thread than the log's: if nobody reads stdout, the log must still go to stderr.
    log.Output().later(lambda: log.write(lines, sys.stdout.fileno()))


def _shortest(path: Path) -> str:
    """The path, relative to the working folder if that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
