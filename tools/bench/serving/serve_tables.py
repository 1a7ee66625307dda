"""Tables and plots of tools/bench/serving/serve.py from its measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tools.bench.plots import Panel
from tools.bench.report import Report

Point = dict[str, Any]
SHARES = ("p50", "p90", "p99")
LATENCIES = ("ttft", "tpot", "gap", "latency")


def line(point: Point) -> str:
    """One measurement in a sentence."""
    return (f"{point['done']:.0f} done, {point['errors']:.0f} errors in {point['seconds']:.0f} s; "
            f"TTFT {_shares(point, 'ttft')} ms, TPOT {_shares(point, 'tpot')} ms (p50/p90/p99), "
            f"{point['requests_per_s']['avg']:.3f} requests/s, {point['tokens_per_s']['avg']:.1f} tokens/s; "
            f"aiperf took {point['client_cpu_s'] / point['client_wall_s']:.2f} CPUs")


def _shares(point: Point, metric: str) -> str:
    digits = 0 if point[metric][SHARES[0]] >= 100 else 1
    return " / ".join(f"{point[metric][share]:.{digits}f}" for share in SHARES)


def pace(point: Point) -> str:
    return f"{point['rate']:g}" if point["rate"] else f"{point['at_once']} at once"


def write(report: Report, points: Sequence[Point], base: str) -> None:
    """All tables and plots; `base` is the server that ratios refer to."""
    points = sorted(points, key=lambda point: (point["server"] != base, point["server"], not point["rate"],
                                               point["rate"], point["at_once"]))
    load = points[0]["load"]
    what = f"{load['images']} images of {load['width']} x {load['height']}, ISL {load['isl']}, OSL {load['osl']}"
    report.table(f"{what}: milliseconds, p50 / p90 / p99",
                 ["server", "requests/s offered", "TTFT", "TPOT", "gap between tokens", "whole request"],
                 [[point["server"], pace(point), *(_shares(point, each) for each in LATENCIES)] for point in points])
    report.table(f"{what}: throughput",
                 ["server", "requests/s offered", "requests/s", "tokens/s", "done", "errors", "aiperf's CPUs"],
                 [[point["server"], pace(point), f"{point['requests_per_s']['avg']:.3f}", point["tokens_per_s"]["avg"],
                   int(point["done"]), int(point["errors"]), point["client_cpu_s"] / point["client_wall_s"]]
                  for point in points])
    others = list(dict.fromkeys(point["server"] for point in points if point["server"] != base))
    ours = {pace(point): point for point in points if point["server"] == base}
    rows = [[point["server"], pace(point), *(_ratio(ours[pace(point)], point, *which) for which in (
        ("tpot", "p50"), ("tpot", "p99"), ("gap", "p99"), ("ttft", "p50"), ("ttft", "p99"), ("latency", "p99"),
        ("requests_per_s", "avg")))]
        for point in points if point["server"] != base and pace(point) in ours]
    if rows:
        report.table(f"{base} divided by the other, at equal load", ["other", "requests/s offered", "TPOT p50",
                     "TPOT p99", "gap p99", "TTFT p50", "TTFT p99", "whole request p99", "requests/s"], rows)
    best = {name: max(point["requests_per_s"]["avg"] for point in points if point["server"] == name)
            for name in [base, *others] if any(point["server"] == name for point in points)}
    report.table("Most requests a second that were measured", ["server", "requests/s", f"{base} to it"],
                 [[name, most, best[base] / most if base in best else None] for name, most in best.items()])
    report.plot("serve", "The same checkpoint on the same CPUs, by growing load up to a constant number of requests",
                "requests a second done",
                [_panel(points, title, "ms", metric, "p99", _done) for title, metric in (
                    ("P99 TPOT", "tpot"), ("P99 TTFT", "ttft"), ("P99 gap between tokens", "gap"))], log=True)
    report.plot("throughput", "The same checkpoint on the same CPUs", "requests a second offered",
                [_panel(points, "Throughput", "requests a second", "requests_per_s", "avg", _offered)])


def _ratio(one: Point, other: Point, metric: str, statistic: str) -> float | None:
    below = other[metric][statistic]
    return one[metric][statistic] / below if below else None


def _done(point: Point) -> float:
    return float(point["requests_per_s"]["avg"])


def _offered(point: Point) -> float | None:
    return point["rate"] or None


def _panel(points: Sequence[Point], title: str, unit: str, metric: str, statistic: str,
           x: Callable[[Point], float | None]) -> Panel:
    """Over `x`, in the order of the points; servers without points are left out."""
    series: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        if (at := x(point)) is not None:
            series.setdefault(point["server"], []).append((at, point[metric][statistic]))
    return Panel(title, unit, series)
