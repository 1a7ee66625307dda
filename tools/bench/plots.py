"""Line plots as PNG and SVG.  matplotlib is optional: `pip install -e .[tools]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Panel(NamedTuple):
    """One set of axes; the points of each line by its name."""

    title: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    marks: Sequence[tuple[float, str]] = ()         # vertical lines: (x, name)


def draw(path: Path, title: str, x: str, panels: Sequence[Panel], log: bool = False) -> None:
    """`path` plus .png and .svg, panels side by side; `log` is of the y axes."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed (pip install -e .[tools])", file=sys.stderr)
        return
    matplotlib.use("Agg")
    # Equal numbers give equal files: no dates, no random names of SVG elements.
    matplotlib.rcParams["svg.hashsalt"] = "epdd"
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6.5 * len(panels), 5), squeeze=False,
                                   layout="constrained")
    for axis, panel in zip(axes[0], panels):
        for name, points in panel.series.items():
            few = len(points) <= 30
            axis.plot(*zip(*points), label=name, marker="o" if few else None, linewidth=1.6 if few else 1.0)
        for at, name in panel.marks:
            axis.axvline(at, color="grey", linestyle="--", linewidth=1, label=name)
        axis.set(title=panel.title, xlabel=x, ylabel=panel.y, **({"yscale": "log"} if log else {"ylim": (0, None)}))
        axis.grid(True, which="both", alpha=0.3)
    figure.suptitle(title)
    # Below all panels, where it hides no line; each name once.
    named = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=130)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    pyplot.close(figure)
