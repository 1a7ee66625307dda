"""Output of the benchmarks: tables on the terminal, numbers as JSON, plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench import plots
from rich.console import Console
from rich.table import Table

# Text, a number, or several numbers shown with slashes between.
Cell = str | float | int | Sequence[float | None] | None


class Report:
    """Prints at once; `close` writes `numbers.json` into the folder, if there is one."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._console = Console(width=None if Console().is_terminal else 160)
        self._numbers: dict[str, Any] = {"tables": [], "said": []}
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)

    def say(self, sentence: str) -> None:
        self._numbers["said"].append(sentence)
        self._console.print(sentence, highlight=False, markup=False)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._numbers["tables"].append({"title": title, "header": list(header), "rows": [list(row) for row in rows]})
        table = Table(*header, title=title, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*map(shown, row))
        self._console.print(table)

    def plot(self, name: str, title: str, x: str, panels: Sequence[plots.Panel], log: bool = False) -> None:
        """Two files, PNG and SVG; nothing without a folder."""
        if self._out is not None:
            plots.draw(self._out / name, title, x, panels, log)

    def close(self, **more: Any) -> None:
        if self._out is not None:
            (self._out / "numbers.json").write_text(json.dumps(self._numbers | more, indent=1) + "\n")
            self._console.print(f"numbers and plots: {self._out}", highlight=False)


def shown(cell: Cell) -> str:
    """Two decimals; three significant digits from a thousand on."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return str(cell)
    if isinstance(cell, float):
        return f"{cell:.2f}" if abs(cell) < 1000 else f"{cell:.0f}"
    return " / ".join(map(shown, cell))
