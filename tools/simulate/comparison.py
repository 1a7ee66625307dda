"""Simulates the daemon's and the published router's policies on equal arrivals."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import mean, median

from tools.bench.plots import Panel
from tools.bench.report import Report
from tools.simulate import scenarios
from tools.simulate.simulator import Encoder, Outcome, Request, Rule, simulate

PUBLISHED_R = 12.0
RATES = [0.5, 1.0, 1.2, 1.5]
# p50 and p99 in seconds at each of RATES, measured with Dynamo 1.6.1's router over emulated encoders (the last line:
# simulated), on arrivals that are not known.
REFERENCE = {"gpu-only": [(1.26, 6.85), (9.85, 18.38), (20.81, 36.41), (33.76, 65.22)],
             "published, unit request": [(1.04, 10.64), (2.95, 10.62), (5.94, 10.98), (12.80, 21.41)],
             "published, unit image": [(1.38, 4.83), (2.26, 7.58), (3.52, 8.71), (10.77, 20.10)],
             "earliest": [(0.88, 4.16), (1.62, 7.11), (2.55, 8.07), (8.47, 15.77)]}
P99_OF_REQUEST_RULE = [0.5, 0.75, 0.8, 0.8]         # targets at each of RATES

# The published router has no queue: a job gets its encoder on arrival.
PUBLISHED_REQUEST = Rule("published, unit request", "budget", "request", PUBLISHED_R, 0.0, math.inf, whole=True)
PUBLISHED_IMAGE = Rule("published, unit image", "budget", "image", PUBLISHED_R, 0.0, math.inf)
EARLY = Rule("earliest finish, early binding", "earliest", slack=0.0, ahead_s=math.inf)
EARLIEST = Rule("earliest", "earliest")
RULES = [Rule("gpu-only", "gpu-only"), PUBLISHED_REQUEST, PUBLISHED_IMAGE, EARLY, Rule("round-robin", "round-robin"),
         Rule("least-loaded", "least-loaded"), Rule("budget, unit request", "budget", "request"),
         Rule("budget, unit image", "budget", "image"), Rule("budget", "budget"), EARLIEST]
BY_NAME = {rule.name: rule for rule in RULES}

Task = tuple[Sequence[Encoder], Sequence[Request], Rule, int]


def outcomes(tasks: Iterable[Task], jobs: int) -> Iterator[Outcome]:
    """Outcomes in the order of the tasks."""
    if jobs == 1:
        yield from map(_run, tasks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_run, tasks, chunksize=4)


def _run(task: Task) -> Outcome:
    fleet, requests, rule, seed = task
    outcome = simulate(fleet, requests, rule, seed=seed)
    if outcome.stuck:
        raise SystemExit(f"{rule.name}: {outcome.stuck} images wait for ever")
    return outcome


Grid = dict[tuple[str, float], list[Outcome]]       # (rule, rate) -> an outcome for each seed


def grid(args: argparse.Namespace, fleet: Sequence[Encoder], rules: Sequence[Rule], rates: Sequence[float],
         mix: scenarios.Mix, seeds: Sequence[int], burst: int = 1) -> Grid:
    """Each rule at each rate, on equal arrivals for all rules."""
    arrivals = {(rate, seed): scenarios.poisson(rate, args.requests, mix, seed, burst)
                for rate in rates for seed in seeds}
    keys = [(rule, rate, seed) for rule in rules for rate in rates for seed in seeds]
    found: Grid = {}
    tasks = ((fleet, arrivals[rate, seed], rule, seed) for rule, rate, seed in keys)
    for (rule, rate, _), outcome in zip(keys, outcomes(tasks, args.jobs)):
        found.setdefault((rule.name, rate), []).append(outcome)
    return found


def both(found: Sequence[Outcome]) -> tuple[float, float]:
    """p50 and p99 in seconds, each the mean over the seeds."""
    return mean(o.percentile(0.5) for o in found), mean(o.percentile(0.99) for o in found)


def four(found: Sequence[Outcome]) -> tuple[float, float, float, float]:
    """p50, p99 and mean of requests, worst age of an image; seconds, each the mean over the seeds."""
    return (*both(found), mean(o.mean for o in found), mean(o.oldest for o in found))


def ratio(over: Sequence[Outcome], under: Sequence[Outcome], share: float) -> tuple[float, float, float]:
    """Median, least and greatest over the seeds of a percentile's ratio on equal arrivals."""
    each = [a.percentile(share) / b.percentile(share) for a, b in zip(over, under)]
    return median(each), min(each), max(each)


def curves(found: Grid, rules: Sequence[Rule], rates: Sequence[float]) -> list[Panel]:
    return [Panel(f"p{round(100 * share)}", "seconds to encode a request", {
        rule.name: [(rate, mean(o.percentile(share) for o in found[rule.name, rate])) for rate in rates]
        for rule in rules}) for share in (0.5, 0.99)]


def latency_table(report: Report, title: str, found: Grid, rules: Sequence[Rule], rates: Sequence[float]) -> None:
    report.table(f"{title}: p50 / p99 / mean of a request, worst age of an image, seconds",
                 ["policy", *(f"{rate:g} requests/s" for rate in rates)],
                 [[rule.name, *(four(found[rule.name, rate]) for rate in rates)] for rule in rules])
