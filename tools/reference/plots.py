"""Draws the plots of docs/benchmarks from the numbers in figures.json beside those pages.

    python -m tools.reference.plots           # writes docs/img/published.svg, encoding.svg and serving.svg
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
# Equal numbers give equal files: no dates, no random names of elements.
matplotlib.rcParams["svg.hashsalt"] = "epdd"
matplotlib.rcParams["svg.fonttype"] = "none"
from matplotlib import pyplot  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"
BAR = 0.27          # of the distance between two groups
LOG_FROM = 20       # lines that differ by more than this factor are drawn on a logarithmic axis


def main() -> None:
    figures = json.loads((DOCS / "benchmarks" / "figures.json").read_text())
    for name, figure in figures.items():
        figure.pop("about")
        loads = figure.pop("loads", None)
        columns = 2 if len(figure) == 4 else len(figure)
        rows = len(figure) // columns
        drawing, axes = pyplot.subplots(rows, columns, figsize=(max(8, 4 * columns), 0.7 + 3.2 * rows), squeeze=False,
                                        layout="constrained")
        for axis, (title, series) in zip(axes.flat, figure.items()):
            bars(axis, series, loads) if loads else lines(axis, series)
            axis.set_title(title)
            axis.grid(True, axis="y", which="both", alpha=0.3)
        handles, names = axes[0][0].get_legend_handles_labels()
        drawing.legend(handles, names, loc="outside lower center", ncols=3)
        drawing.savefig(DOCS / "img" / f"{name}.svg", metadata={"Date": None})
        pyplot.close(drawing)


def lines(axis: Any, series: dict[str, list[tuple[float, float]]]) -> None:
    for name, points in series.items():
        axis.plot(*zip(*points), label=name, marker="o", markersize=4)
    values = [value for points in series.values() for _, value in points]
    if max(values) > LOG_FROM * min(values):
        axis.set_yscale("log")
        axis.set_yticks([2, 5, 10, 20, 50, 100], [2, 5, 10, 20, 50, 100])
        axis.minorticks_off()
    else:
        axis.set_ylim(0, None)
    axis.set_xlabel("requests/s offered")


def bars(axis: Any, series: dict[str, list[float]], loads: list[str]) -> None:
    for i, (name, values) in enumerate(series.items()):
        places = [at + BAR * (i - (len(series) - 1) / 2) for at in range(len(loads))]
        axis.bar_label(axis.bar(places, values, BAR, label=name), fmt="{:.4g}", fontsize=7)
    axis.set_xticks(range(len(loads)), loads)
    axis.set_xlabel("offered")


if __name__ == "__main__":
    main()
