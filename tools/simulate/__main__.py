"""Simulates a fleet by discrete events over the daemon's own router: tables, plots, and which encoders pay.

    python -m tools.simulate table                    # the reference table, and its ratios on equal arrivals
    python -m tools.simulate scenarios                # mixed sizes, mis-set R, a CPU that becomes 3 x slower
    python -m tools.simulate slack                    # effect of the queue's order
    python -m tools.simulate sweep                    # which R, and how many CPU encoders, pay
    python -m tools.simulate run --fleet gpu:2@0.11,cpu:400@1.32 --images 1-8 --rates 2 4 --burst 4
    python -m tools.simulate run --fleet xeon6747p-5xl40s --trace requests.jsonl

A fleet is a profile of `epdd --emulate` or KIND:COUNT@A[/B[/C]] groups (seconds = A + B * patches + C * patches^2).
--out DIR writes plots (PNG, SVG) and numbers.json.  Seconds are from a request's arrival to its last encoded image.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from tools.bench.plots import Panel
from tools.bench.report import Cell, Report
from tools.simulate import scenarios
from tools.simulate.comparison import (BY_NAME, EARLIEST, P99_OF_REQUEST_RULE, PUBLISHED_IMAGE, PUBLISHED_R,
                                       PUBLISHED_REQUEST, RATES, REFERENCE, RULES, Grid, both, curves, four, grid,
                                       latency_table, outcomes, ratio)
from tools.simulate.simulator import Encoder, Outcome, Request, Rule, percentile


# --- the reference table

def table(args: argparse.Namespace, report: Report) -> None:
    """The reference table over several seeds, its ratios, and the table on arrivals like those it was measured on."""
    fleet, mix = scenarios.fleet(scenarios.TABLE_FLEET), scenarios.equal(8)
    found = grid(args, fleet, RULES, RATES, mix, range(args.seeds))
    columns = [f"{rate:g} requests/s" for rate in RATES]
    report.table(f"p50 / p99 seconds to encode a request, mean of {args.seeds} seeds", ["policy", *columns],
                 [[rule.name, *(both(found[rule.name, rate]) for rate in RATES)] for rule in RULES])
    report.table("reference: p50 / p99, other arrivals", ["policy", *columns],
                 [[name, *cells] for name, cells in REFERENCE.items()])
    for base in ("gpu-only", "published, unit request", "published, unit image"):
        report.table(f"earliest over {base}, equal arrivals: median / least / greatest over the seeds",
                     ["percentile", *columns],
                     [[f"p{round(100 * share)}",
                       *(ratio(found["earliest", rate], found[base, rate], share) for rate in RATES)]
                      for share in (0.5, 0.99)])
    report.plot("table", "1 GPU encoder at 0.11 s, 4 CPU encoders at 1.32 s, 8 equal images a request", "requests/s",
                curves(found, [rule for rule in RULES if rule.name != "round-robin"], RATES), log=True)
    _harsh(args, report, fleet, mix)
    for rate, target in zip(RATES, P99_OF_REQUEST_RULE):
        got = ratio(found["earliest", rate], found["published, unit request", rate], 0.99)[0]
        report.say(f"{rate:g} requests/s: p99 of earliest is {got:.2f} of the published request rule's "
                   f"(target {target:g}: {'reached' if got <= target else 'missed'})")


def _harsh(args: argparse.Namespace, report: Report, fleet: Sequence[Encoder], mix: scenarios.Mix) -> None:
    """The seed whose GPU-only numbers are nearest the reference's, with all policies on it."""
    searched = grid(args, fleet, [BY_NAME["gpu-only"]], RATES, mix, range(args.search))
    harsh = min(range(args.search), key=lambda seed: distance(searched, seed))
    found = grid(args, fleet, RULES, RATES, mix, [harsh])
    last = scenarios.poisson(1.0, args.requests, mix, harsh)[-1].at
    report.say(f"Nearest to the reference's GPU-only numbers of {args.search} seeds: seed {harsh}, whose "
               f"{args.requests} requests come in {last / args.requests:.2f} of their mean time.")
    report.table(f"seed {harsh}: p50 / p99, beside them the reference",
                 ["policy", *(title for rate in RATES for title in (f"{rate:g}/s", "reference"))],
                 [[rule.name, *(cell for i, rate in enumerate(RATES)
                                for cell in (both(found[rule.name, rate]), REFERENCE.get(rule.name, [None] * 4)[i]))]
                  for rule in RULES])
    report.plot("table-harsh", f"Arrivals of seed {harsh}, about as harsh as the reference's", "requests/s",
                curves(found, [rule for rule in RULES if rule.name in REFERENCE], RATES), log=True)


def distance(found: Grid, seed: int) -> float:
    """Distance of a seed's GPU-only numbers from the reference's: sum of squared logarithms."""
    return sum(math.log(found["gpu-only", rate][seed].percentile(share) / wanted) ** 2
               for rate, cell in zip(RATES, REFERENCE["gpu-only"]) for share, wanted in zip((0.5, 0.99), cell))


# --- scenarios

def scenario_runs(args: argparse.Namespace, report: Report) -> None:
    """Mixed sizes, a mis-set R, and a CPU that becomes slower."""
    mixed_sizes(args, report)
    wrong_ratio(args, report)
    slow_cpu(args, report)


MIXED_LOADS = (0.3, 0.6, 0.8, 0.95)


def mixed_sizes(args: argparse.Namespace, report: Report) -> None:
    fleet, mix = scenarios.fleet(scenarios.MIXED_FLEET), scenarios.mixed()
    rates = [round(load * scenarios.capacity(fleet, mix), 2) for load in MIXED_LOADS]
    rules = [rule for rule in RULES if rule.name != "round-robin"]
    found = grid(args, fleet, rules, rates, mix, range(args.seeds))
    latency_table(report, f"thumbnails beside 4K, 1 to 8 images, at {MIXED_LOADS} of capacity", found, rules, rates)
    report.plot("mixed", "224 px to 4K, 1 to 8 images a request", "requests/s", curves(found, rules, rates), log=True)


def wrong_ratio(args: argparse.Namespace, report: Report) -> None:
    """R half and twice the truth, for the published rule and for the daemon's."""
    fleet, mix = scenarios.fleet(scenarios.TABLE_FLEET), scenarios.equal(8)
    rules = [replace(rule, name=f"{rule.name}, R {value:g}", ratio=value)
             for rule in (PUBLISHED_REQUEST, PUBLISHED_IMAGE, BY_NAME["budget"]) for value in (6.0, 12.0, 24.0)]
    rules += [replace(BY_NAME["budget"], name="budget, R auto"), EARLIEST]
    found = grid(args, fleet, rules, RATES, mix, range(args.seeds))
    report.table("R mis-set, the truth is 12: p50 / p99 seconds",
                 ["policy", *(f"{rate:g} requests/s" for rate in RATES)],
                 [[rule.name, *(both(found[rule.name, rate]) for rate in RATES)] for rule in rules])


SLOW_FACTOR = 3.0
WITHIN = 0.1            # R has recovered within this factor of the truth


def slow_cpu(args: argparse.Namespace, report: Report, rate: float = 1.2) -> None:
    """One of four CPU encoders becomes slower half-way; which policies adapt, and when."""
    mix, requests = scenarios.equal(8), 2 * args.requests
    half = args.requests / rate
    fleet = scenarios.fleet(f"gpu:1@0.11,cpu:3@1.32,cpu:1@1.32x{SLOW_FACTOR:g}after{half:g}")
    truth = PUBLISHED_R * 4 / (3 + 1 / SLOW_FACTOR)
    rules = [BY_NAME["gpu-only"], PUBLISHED_REQUEST, PUBLISHED_IMAGE,
             replace(BY_NAME["budget"], name="budget, R 12", ratio=PUBLISHED_R),
             replace(BY_NAME["budget"], name="budget, R auto"), BY_NAME["least-loaded"], EARLIEST]
    arrivals = [scenarios.poisson(rate, requests, mix, seed) for seed in range(args.seeds)]
    keys = [(rule, seed) for rule in rules for seed in range(args.seeds)]
    found: dict[str, list[Outcome]] = {}
    for (rule, _), outcome in zip(keys, outcomes(((fleet, arrivals[s], r, s) for r, s in keys), args.jobs)):
        found.setdefault(rule.name, []).append(outcome)
    rows: list[list[Cell]] = []
    for rule in rules:
        before, after = zip(*(split(o, a, half) for o, a in zip(found[rule.name], arrivals)))
        rows.append([rule.name, *((mean(percentile(part, 0.5) for part in half_of),
                                   mean(percentile(part, 0.99) for part in half_of)) for half_of in (before, after))])
    report.table(f"one CPU encoder of four becomes {SLOW_FACTOR:g} x slower half-way, {rate:g} requests/s: "
                 "p50 / p99 seconds", ["policy", "before", "after"], rows)
    for name in ("budget, R auto", "earliest"):
        times = [recovered(o, half, truth) for o in found[name]]
        report.say(f"{name}: measured R is within {WITHIN:.0%} of the new truth ({truth:g}) after "
                   f"{median(times):.1f} s of traffic (median; {max(times):.1f} s at most of {args.seeds} seeds)")
    report.plot("slow-cpu", f"One CPU encoder of four becomes {SLOW_FACTOR:g} x slower", "seconds", [
        Panel("R measured", "R", {name: found[name][0].ratios for name in ("budget, R auto", "earliest")},
              [(half, "slower from here")]),
        Panel("latency of requests, by arrival", "seconds", {
            name: list(zip((request.at for request in arrivals[0]), found[name][0].latencies))
            for name in ("published, unit image", "budget, R auto", "earliest")}, [(half, "slower from here")])])


def split(outcome: Outcome, requests: Sequence[Request], moment: float) -> tuple[list[float], list[float]]:
    """Latencies of the requests that arrived before and after."""
    pairs = list(zip(requests, outcome.latencies))
    return ([latency for request, latency in pairs if request.at < moment],
            [latency for request, latency in pairs if request.at >= moment])


def recovered(outcome: Outcome, since: float, truth: float) -> float:
    """Seconds until R is near the truth; infinite: never."""
    return next((at - since for at, value in outcome.ratios if at >= since and abs(value / truth - 1) <= WITHIN),
                math.inf)


# --- ordering

def slack(args: argparse.Namespace, report: Report) -> None:
    """Effect of letting small requests pass large ones."""
    fleet, mix = scenarios.fleet(scenarios.MIXED_FLEET), scenarios.mixed()
    rates = [round(load * scenarios.capacity(fleet, mix), 2) for load in MIXED_LOADS]
    rules = [Rule(f"slack {value:g}", "earliest", slack=value) for value in (0.0, 0.5, 1.0, 2.0, 4.0)]
    found = grid(args, fleet, rules, rates, mix, range(args.seeds))
    latency_table(report, "earliest, mixed sizes", found, rules, rates)
    base = {rate: four(found["slack 0", rate]) for rate in rates}
    report.table("over slack 0 on equal arrivals: p50 / p99 / mean / worst age",
                 ["", *(f"{rate:g} requests/s" for rate in rates)],
                 [[rule.name, *([a / b for a, b in zip(four(found[rule.name, rate]), base[rate])] for rate in rates)]
                  for rule in rules[1:]])
    report.plot("slack", "Ordering the queue, mixed sizes", "requests/s", curves(found, rules, rates))


# --- which encoders pay

PAYS = 0.05             # an encoder pays if it and the later ones cut p99 by this much each, on average


def sweep(args: argparse.Namespace, report: Report) -> None:
    """Which R, and how many CPU encoders, pay."""
    gpu, cpu = scenarios.fleet(scenarios.TABLE_FLEET)[:2]
    if args.fleet:
        gpu, cpu = (next(e for e in scenarios.fleet(args.fleet) if e.group.kind == kind) for kind in ("gpu", "cpu"))
    mix = scenarios.equal(8)

    def fleet_of(cpus: int) -> list[Encoder]:
        return [gpu._replace(name="encoder/0"), *(cpu._replace(name=f"encoder/{i + 1}") for i in range(cpus))]

    _sweep_ratio(args, report, fleet_of(4), mix)
    found: dict[int, Grid] = {n: grid(args, fleet_of(n), [EARLIEST], args.rates, mix, range(args.seeds))
                              for n in range(args.cpus_max + 1)}
    cells = {(n, rate): both(found[n]["earliest", rate]) for n in found for rate in args.rates}
    report.table("CPU encoders beside 1 GPU encoder, earliest: p50 / p99 seconds, and what the last one cut off p99",
                 ["CPU encoders", *(f"{rate:g} requests/s" for rate in args.rates)],
                 [[str(n), *((*cells[n, rate], 1 - cells[n, rate][1] / cells[n - 1, rate][1] if n else None)
                             for rate in args.rates)] for n in found])
    for rate in args.rates:
        report.say(worth([cells[n, rate][1] for n in found], rate))
    report.plot("cpus", "CPU encoders beside one GPU encoder, earliest", "CPU encoders", [
        Panel(f"p{round(100 * share)}", "seconds to encode a request", {
            f"{rate:g} requests/s": [(n, cells[n, rate][i]) for n in found] for rate in args.rates})
        for i, share in enumerate((0.5, 0.99))], log=True)


def worth(p99: Sequence[float], rate: float, here: int = 4) -> str:
    """A sentence on the gain from CPU encoders; p99 in seconds with 0, 1, 2... of them, `here` the present number."""
    last = len(p99) - 1
    here = min(here, last - 1)
    pays = next(n for n in range(last + 1) if p99[last] >= (1 - PAYS) ** (last - n) * p99[n])
    end = f"beyond {pays} they bring less than" if pays < last else f"up to {last} they bring at least"
    return (f"{rate:g} requests/s: {here} CPU encoders cut p99 from {p99[0]:.2f} s to {p99[here]:.2f} s, one more "
            f"another {1 - p99[here + 1] / p99[here]:.0%}; {end} {PAYS:.0%} each.")


def _sweep_ratio(args: argparse.Namespace, report: Report, fleet: Sequence[Encoder], mix: scenarios.Mix) -> None:
    values = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 48.0]
    rules = [Rule(f"R {value:g}", "budget", ratio=value) for value in values] + [Rule("R auto", "budget"), EARLIEST]
    found = grid(args, fleet, rules, args.rates, mix, range(args.seeds))
    report.table("budget by R: p50 / p99 seconds", ["", *(f"{rate:g} requests/s" for rate in args.rates)],
                 [[rule.name, *(both(found[rule.name, rate]) for rate in args.rates)] for rule in rules])
    for rate in args.rates:
        best = min(rules[:len(values)], key=lambda rule: both(found[rule.name, rate])[1])
        auto = both(found["R auto", rate])[1]
        report.say(f"{rate:g} requests/s: p99 is least with {best.name}, {both(found[best.name, rate])[1]:.2f} s; "
                   f"measured R ({found['R auto', rate][0].ratios[-1][1]:.1f}) gives {auto:.2f} s, earliest "
                   f"{both(found['earliest', rate])[1]:.2f} s.")
    report.plot("ratio", "The budget rule by R", "R", [
        Panel(f"p{round(100 * share)}", "seconds to encode a request", {
            f"{rate:g} requests/s": [(value, both(found[f"R {value:g}", rate])[i]) for value in values]
            for rate in args.rates}) for i, share in enumerate((0.5, 0.99))], log=True)


# --- any fleet

def run(args: argparse.Namespace, report: Report) -> None:
    """Any fleet, mix and arrivals."""
    fleet = scenarios.fleet(args.fleet or scenarios.TABLE_FLEET)
    rules = [replace(BY_NAME[name], ratio=args.ratio or BY_NAME[name].ratio) for name in args.policies]
    low, _, high = args.images.partition("-")
    sizes = [scenarios.size(text) for text in args.sizes] if args.sizes else scenarios.SIZES
    mix = scenarios.mixed(int(low), int(high or low), sizes, args.text_share)
    if args.trace:
        requests = scenarios.recorded(args.trace)
        rates = [round(len(requests) / max(requests[-1].at, 1e-9), 2)]
        found = {(rule.name, rates[0]): [outcome] for rule, outcome in zip(rules, outcomes(
            ((fleet, requests, rule, 0) for rule in rules), args.jobs))}
    else:
        rates = args.rates
        found = grid(args, fleet, rules, rates, mix, range(args.seeds), args.burst)
        report.say(f"{len(fleet)} encoders can do {scenarios.capacity(fleet, mix):.2f} requests/s of this mix.")
    latency_table(report, "", found, rules, rates)
    cpus, total = scenarios.names(fleet, "cpu"), len(fleet)
    report.table(f"share of the images encoded on CPUs ({len(cpus)} of {total} encoders)",
                 ["policy", *(f"{rate:g} requests/s" for rate in rates)],
                 [[rule.name, *(mean(o.images_by(cpus) / max(1, sum(done.images for done in o.encoded))
                                     for o in found[rule.name, rate]) for rate in rates)] for rule in rules])
    report.plot("run", args.fleet or scenarios.TABLE_FLEET, "requests/s", curves(found, rules, rates), log=True)


COMMANDS = {"table": table, "scenarios": scenario_runs, "slack": slack, "sweep": sweep, "run": run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=[*COMMANDS, "all"], help="all: everything but run")
    parser.add_argument("--fleet", help="a profile, or KIND:COUNT@A[/B[/C]] groups (default: the reference table's)")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="requests/s")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--search", type=int, default=400, help="seeds to look for the reference's arrivals in")
    parser.add_argument("--cpus-max", type=int, default=16)
    parser.add_argument("--policies", nargs="+", choices=list(BY_NAME), default=list(BY_NAME), metavar="NAME")
    parser.add_argument("--ratio", type=float, default=0.0, help="R; 0: each policy's own")
    parser.add_argument("--images", default="8", help="of a request: a number, or 1-8")
    parser.add_argument("--sizes", nargs="+", metavar="WxH", help="default: 224x224 to 3840x2160")
    parser.add_argument("--text-share", type=float, default=0.0, help="of the requests: these have no images")
    parser.add_argument("--burst", type=int, default=1, help="requests that come together")
    parser.add_argument("--trace", type=Path, help='JSON lines: {"at": seconds, "images": [[width, height], ...]}')
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--out", type=Path, help="folder for plots and numbers")
    args = parser.parse_args()
    report = Report(args.out)
    for command in ([name for name in COMMANDS if name != "run"] if args.command == "all" else [args.command]):
        COMMANDS[command](args, report)
    report.close(command=args.command, requests=args.requests, seeds=args.seeds)


if __name__ == "__main__":
    main()
