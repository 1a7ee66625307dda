"""`epdctl status --watch`: shows the status every second, with bars, until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from epdd.ctl import client, render
from epdd.ctl.render import Json

PERIOD_S = 1.0
BAR_COLUMNS = 8
NARROW_COLUMNS = 100                            # narrower terminals: the table leaves out WIDE_ONLY
WIDE_ONLY = frozenset({"CPUS", "DONE", "MEMORY"})


def watch(find: Callable[[], Path]) -> int:
    """Show the status until Ctrl-C.  If the daemon goes away, wait for the next one."""
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(_frame(find, console.width), refresh=True)
                time.sleep(PERIOD_S)
        except KeyboardInterrupt:
            return 0


def _frame(find: Callable[[], Path], columns: int) -> RenderableType:
    try:
        return screen(client.ask(find(), "status"), columns)
    except client.CtlError as error:
        text = Text.assemble((str(error), "bold red"), "\n\nlooking again each second; Ctrl-C leaves")
        return Panel(text, title="epdd", border_style="red", padding=(1, 2))


def screen(snapshot: Json, columns: int) -> RenderableType:
    """One frame for a terminal of this width."""
    state = str(snapshot["state"])
    style = render.STYLES.get(state, "red")
    notes = [Text.assemble(("! ", "yellow"), note) for note in render.notes(snapshot)]
    parts: list[RenderableType] = [_workers(snapshot["workers"], columns >= NARROW_COLUMNS), Text(), _facts(snapshot)]
    if notes:
        parts += [Text(), *notes]
    return Panel(Group(*parts), title=Text(_title(snapshot), style="bold"), title_align="left",
                 subtitle=Text.assemble((state, f"bold {style}"), f"  up {render.duration(snapshot['uptime_s'])}"),
                 subtitle_align="right", border_style=style, padding=1)


def _title(snapshot: Json) -> str:
    listen = snapshot["listen"]
    return f"epdd {snapshot['version']}  {snapshot['model']['name']}  {listen['host']}:{listen['port']}"


def _workers(workers: list[Json], wide: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    shown = [i for i, name in enumerate(render.HEADER) if wide or name not in WIDE_ONLY]
    for name in (render.HEADER[i] for i in shown):
        right = name in render.RIGHT and name != render.LEVEL
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for worker in workers:
        cells: list[RenderableType] = list(render.worker_cells(worker))
        cells[render.HEADER.index("STATE")] = Text(render.state_text(worker), style=render.state_style(worker))
        cells[render.HEADER.index(render.LEVEL)] = _last_cell(worker)
        table.add_row(*(cells[i] for i in shown))
    return table


def _last_cell(worker: Json) -> RenderableType:
    """Progress while a worker loads; afterwards an encoder's share of the work, or a PD worker's KV cache."""
    if worker["state"] == "STARTING":
        return _bar(worker["progress"] or 0.0, "yellow")
    level = render.level(worker)
    if level is None:
        return Text("-", style="dim")
    return _bar(level, "cyan" if worker["role"] == "encoder" else _level(level))


def _facts(snapshot: Json) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, line in render.facts(snapshot):
        value: RenderableType = Text(line)
        if name == "arena":
            value = _with_bar(snapshot["arena"]["used_bytes"], snapshot["arena"]["bytes"], line, "cyan")
        if name == "cache":
            value = _with_bar(snapshot["cache"]["bytes"], snapshot["cache"]["limit_bytes"], line, "cyan")
        table.add_row(Text(name, style="bold"), value)
    return table


def _with_bar(used: float | None, total: float | None, line: str, style: str) -> Table:
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_row(_bar((used or 0) / total if total else 0.0, style), Text(line))
    return row


def _level(share: float) -> str:
    return "red" if share > 0.95 else "yellow" if share > 0.8 else "green"


def _bar(share: float, style: str) -> Text:
    """A bar that is readable without colours; the number is more exact than eight blocks."""
    full = round(BAR_COLUMNS * min(1.0, share))
    return Text.assemble(("█" * full, style), ("░" * (BAR_COLUMNS - full), "dim"), f" {100 * share:3.0f}%")
