"""Every policy live: the real daemon, HTTP, queue and leases over emulated encoders, beside the simulator.

    python -m tools.bench.routing.policies table          # the reference table
    python -m tools.bench.routing.policies mixed          # thumbnails beside 4K
    python -m tools.bench.routing.policies ratio          # R mis-set
    python -m tools.bench.routing.policies slow           # one CPU encoder becomes 3 x slower half-way

Requests arrive as in the simulator, also while earlier ones run.  Results are seconds from sending a request to its
first token, by the emulated clock.  Prefill and decode take about a millisecond, so this is the time to encode. A fresh
daemon serves each policy at each rate.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tools.bench import live
from tools.bench.plots import Panel
from tools.bench.report import Cell, Report
from tools.simulate import scenarios
from tools.simulate.comparison import (BY_NAME, EARLIEST, P99_OF_REQUEST_RULE, PUBLISHED_IMAGE, PUBLISHED_R,
                                       PUBLISHED_REQUEST, RATES, REFERENCE)
from tools.simulate.simulator import Encoder, Request, Rule, percentile, simulate

LEAD_S = 5.0                # seconds of this machine until all workers are ready
AGREE = 0.1                 # allowed difference between live and simulated
BASELINES = [PUBLISHED_REQUEST, PUBLISHED_IMAGE]    # not in the daemon: simulated only
PRODUCT = [BY_NAME[name] for name in ("gpu-only", "round-robin", "least-loaded", "budget", "earliest")]


class Run(NamedTuple):
    """One rule at one rate: seconds of each request, by emulated clock, in order of arrival."""

    live: list[float]
    simulated: list[float]

    def pair(self, share: float) -> tuple[float, float]:
        return percentile(self.live, share), percentile(self.simulated, share)


async def measure(args: argparse.Namespace, fleet: Sequence[Encoder], requests: Sequence[Request],
                  sizes: Sequence[Sequence[scenarios.Size]], rule: Rule, what: str,
                  changing: Sequence[Encoder] | None = None) -> Run:
    """Live and simulated, on equal arrivals.

    `changing`: the live fleet, if it changes with time.  The clock of its last encoder starts when that is ready,
    LEAD_S seconds of this machine before the arrivals' clock.
    """
    simulated = simulate(fleet, requests, rule).latencies
    if rule in BASELINES:
        return Run([], simulated)
    settings = [f"router.policy={rule.policy}", f"router.unit={rule.unit}", f"router.ratio={rule.ratio}",
                f"router.slack={rule.slack}", f"encoder.ahead_s={rule.ahead_s / args.scale}",
                "server.max_requests=1000", f"arena.bytes={args.arena_mib << 20}", "arena.cache_bytes=0",
                *live.FREE_PD_SETTINGS]
    rng = random.Random(args.seed)
    bodies = [live.body(each, "What is this?", rng, max_tokens=1) for each in sizes]
    async with live.running(live.profile(changing or fleet, args.scale), settings) as daemon:
        began = daemon.ready_at[fleet[-1].name] + LEAD_S if changing else None
        times = [request.at / args.scale for request in requests]
        answers = await live.open_loop(daemon.chat_url, times, bodies, began)
    run = Run([(answer.first - answer.sent) * args.scale for answer in answers], simulated)
    late = live.late(answers)
    note = f"; {late} sent late" if late else ""
    print(f"  {what} {rule.name}: live {percentile(run.live, 0.5):.2f} / {percentile(run.live, 0.99):.2f}, simulated "
          f"{percentile(simulated, 0.5):.2f} / {percentile(simulated, 0.99):.2f}{note}", flush=True)
    return run


Found = dict[tuple[str, float], Run]


async def rates(args: argparse.Namespace, fleet: Sequence[Encoder], rules: Sequence[Rule], wanted: Sequence[float],
                mix: scenarios.Sized) -> Found:
    found: Found = {}
    for rate in wanted:
        requests, sizes = arrivals(args, rate, args.requests, mix)
        for rule in rules:
            found[rule.name, rate] = await measure(args, fleet, requests, sizes, rule, f"{rate:g}/s")
    return found


def arrivals(args: argparse.Namespace, rate: float, count: int,
             mix: scenarios.Sized) -> tuple[list[Request], list[tuple[scenarios.Size, ...]]]:
    """The simulator's arrivals, and the images' sizes in pixels."""
    sizes = scenarios.draws(mix, count, args.seed)
    return scenarios.poisson(rate, count, scenarios.in_patches(mix), args.seed), sizes


def both(seconds: Sequence[float]) -> Cell:
    """p50 and p99."""
    return (percentile(seconds, 0.5), percentile(seconds, 0.99)) if seconds else None


def show(report: Report, title: str, found: Found, rules: Sequence[Rule], wanted: Sequence[float], name: str) -> None:
    columns = ["policy", *(f"{rate:g} requests/s" for rate in wanted)]
    for which, part in (("live", 0), ("simulated, equal arrivals", 1)):
        report.table(f"{title}, {which}: p50 / p99 seconds", columns, [
            [rule.name, *(both(found[rule.name, rate][part]) for rate in wanted)] for rule in rules])
    ran = [rule for rule in rules if rule not in BASELINES]
    report.table(f"{title}, live over simulated: p50 / p99", columns, [
        [rule.name, *([a / b for a, b in map(found[rule.name, rate].pair, (0.5, 0.99))] for rate in wanted)]
        for rule in ran])
    worst = max((abs(a / b - 1), rule.name, rate) for rule in ran for rate in wanted
                for a, b in map(found[rule.name, rate].pair, (0.5, 0.99)))
    report.say(f"Live and simulated differ by {worst[0]:.1%} at most ({worst[1]} at {worst[2]:g} requests/s): "
               f"{'within' if worst[0] <= AGREE else 'over'} {AGREE:.0%}.")
    report.plot(name, title, "requests/s", [
        Panel(f"p{round(100 * share)}", "seconds to encode a request", {
            rule.name + (", simulated" if rule in BASELINES else ", live"): [
                (rate, percentile(found[rule.name, rate][rule in BASELINES], share)) for rate in wanted]
            for rule in rules}) for share in (0.5, 0.99)], log=True)


async def table(args: argparse.Namespace, report: Report) -> None:
    """The reference table."""
    fleet = scenarios.fleet(scenarios.TABLE_FLEET)
    rules = [*BASELINES, *PRODUCT]
    found = await rates(args, fleet, rules, args.rates, scenarios.equal_sizes(8))
    show(report, "1 GPU encoder at 0.11 s, 4 CPU encoders at 1.32 s, 8 equal images", found, rules, args.rates, "table")
    report.table("reference: p50 / p99 seconds, other arrivals",
                 ["policy", *(f"{rate:g} requests/s" for rate in RATES)],
                 [[name, *cells] for name, cells in REFERENCE.items()])
    for rate, target in zip(RATES, P99_OF_REQUEST_RULE):
        if rate in args.rates:
            got = percentile(found["earliest", rate].live, 0.99)
            rule = percentile(found[PUBLISHED_REQUEST.name, rate].simulated, 0.99)
            measured = REFERENCE[PUBLISHED_REQUEST.name][RATES.index(rate)][1]
            report.say(f"{rate:g} requests/s: live p99 of earliest is {got / rule:.2f} of the published request rule's "
                       f"(simulated on these arrivals; {got / measured:.2f} of the reference's on others); "
                       f"target {target:g}: {'reached' if got <= target * rule else 'missed'}")


async def mixed(args: argparse.Namespace, report: Report) -> None:
    """Thumbnails beside 4K."""
    fleet, mix = scenarios.fleet(scenarios.MIXED_FLEET), scenarios.mixed_sizes()
    wanted = [round(load * scenarios.capacity(fleet, scenarios.in_patches(mix)), 2) for load in (0.3, 0.6, 0.8, 0.95)]
    rules = [*BASELINES, *(rule for rule in PRODUCT if rule.name != "round-robin")]
    found = await rates(args, fleet, rules, wanted, mix)
    show(report, "224 px to 4K, 1 to 8 images", found, rules, wanted, "mixed")


async def ratio(args: argparse.Namespace, report: Report) -> None:
    """R half and twice the truth."""
    rules = [replace(BY_NAME["budget"], name=f"budget, R {value:g}", ratio=value) for value in (6.0, PUBLISHED_R, 24.0)]
    rules += [replace(BY_NAME["budget"], name="budget, R auto"), EARLIEST]
    fleet = scenarios.fleet(scenarios.TABLE_FLEET)
    found = await rates(args, fleet, rules, args.rates, scenarios.equal_sizes(8))
    show(report, "R mis-set, the truth is 12", found, rules, args.rates, "ratio")


async def slow(args: argparse.Namespace, report: Report, rate: float = 1.2, factor: float = 3.0) -> None:
    """One CPU encoder of four becomes slower half-way."""
    count, half = 2 * args.requests, args.requests / rate
    fleet, changing = (scenarios.fleet(f"gpu:1@0.11,cpu:3@1.32,cpu:1@1.32x{factor:g}after{after:g}")
                       for after in (half, half + LEAD_S * args.scale))
    requests, sizes = arrivals(args, rate, count, scenarios.equal_sizes(8))
    rules = [BY_NAME["gpu-only"], replace(BY_NAME["budget"], name="budget, R 12", ratio=PUBLISHED_R),
             replace(BY_NAME["budget"], name="budget, R auto"), EARLIEST]
    rows: list[list[Cell]] = []
    lines = {}
    for rule in rules:
        run = await measure(args, fleet, requests, sizes, rule, f"{rate:g}/s", changing)
        first = sum(request.at < half for request in requests)
        row: list[Cell] = [rule.name]
        for part in (run.live[:first], run.live[first:], run.simulated[first:]):
            row.append(both(part))
        rows.append(row)
        lines[rule.name] = list(zip((request.at for request in requests), run.live))
        row.append(both([seconds for request, seconds in zip(requests, run.live) if request.at >= half + 30]))
    report.table(f"one CPU encoder of four becomes {factor:g} x slower half-way, {rate:g} requests/s: p50 / p99 s",
                 ["policy", "before, live", "after, live", "after, simulated", "from 30 s after, live"], rows)
    report.plot("slow", f"One CPU encoder of four becomes {factor:g} x slower", "seconds", [
        Panel("live, by arrival", "seconds to encode a request", lines, [(half, "slower from here")])])


COMMANDS = {"table": table, "mixed": mixed, "ratio": ratio, "slow": slow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=[*COMMANDS, "all"])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="requests/s")
    parser.add_argument("--requests", type=int, default=200, help="at each rate")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals, as in the simulator")
    parser.add_argument("--scale", type=float, default=10.0, help="how many times faster than the profile")
    parser.add_argument("--arena-mib", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="folder for plots and numbers")
    args = parser.parse_args()
    report = Report(args.out)
    for command in (COMMANDS if args.command == "all" else [args.command]):
        asyncio.run(COMMANDS[command](args, report))
    report.close(command=args.command, requests=args.requests, seed=args.seed, scale=args.scale)


if __name__ == "__main__":
    main()
