"""The published experiment live: 1E/4PD against (4 CPU + 1 GPU)E/4PD, 8 images of 1080p, ISL 128, OSL 256.

    python -m tools.bench.routing.published --out published

The real daemon, HTTP, queue and leases over emulated devices (profile xeon6747p-5xl40s, whose prefill and decode times
are estimates) and embeddings of true size: encoders write 510 MiB a request into the arena, PD workers compare every
byte.  Prints P99 TTFT and TPOT and throughput by the emulated clock, and the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path
from typing import NamedTuple

from tools.bench import live
from tools.bench.plots import Panel
from tools.bench.report import Report
from tools.simulate import scenarios
from tools.simulate.simulator import percentile

from epdd import emulation

PROFILE = "xeon6747p-5xl40s"
SETUPS = {"1E/4PD": "gpu:1", "(4 CPU + 1 GPU)E/4PD": "gpu:1,cpu:4"}
ALONE, BOTH = SETUPS
IMAGES, ISL, OSL = 8, 128, 256
RATES = [1.0, 1.2, 1.5, 2.0]
TARGET = 1.3
WORD = " red"               # one token of the demo model's vocabulary
LOOK_S = 0.2


class Run(NamedTuple):
    """Seconds by the emulated clock."""

    ttft: float             # p99
    tpot: float             # p99 over requests of the mean time between tokens
    tokens: float           # a second
    requests: float         # a second
    arena_bytes: int        # highest use


async def measure(args: argparse.Namespace, setup: str, rate: float) -> Run:
    rng = random.Random(f"{args.seed} {rate}")
    text = WORD * ISL
    sizes = [scenarios.FULL_HD] * IMAGES
    bodies = [live.body(sizes, text, rng, max_tokens=OSL, ignore_eos=True, stream_options={"include_usage": True})
              for _ in range(args.requests)]
    arrivals = scenarios.poisson(rate, args.requests, scenarios.equal(IMAGES), args.seed)
    settings = [f"emulation.scale={args.scale}", f"encoder.workers={SETUPS[setup]}",
                f"arena.bytes={args.arena_gib << 30}", "arena.cache_bytes=0", "server.max_requests=1000",
                f"router.policy={args.policy}"]
    async with live.running(PROFILE, settings) as daemon:
        most = [0]
        looking = asyncio.create_task(_look(daemon, most))
        answers = await live.open_loop(daemon.chat_url, [request.at / args.scale for request in arrivals], bodies)
        looking.cancel()
    assert all(answer.tokens == OSL for answer in answers)
    seconds = (max(answer.last for answer in answers) - min(answer.sent for answer in answers)) * args.scale
    run = Run(percentile([(answer.first - answer.sent) * args.scale for answer in answers], 0.99),
              percentile([(answer.last - answer.first) * args.scale / (OSL - 1) for answer in answers], 0.99),
              len(answers) * OSL / seconds, len(answers) / seconds, most[0])
    print(f"  {rate:g}/s {setup}: P99 TTFT {run.ttft:.2f} s, P99 TPOT {1e3 * run.tpot:.1f} ms, "
          f"{run.tokens:.1f} tokens/s, {run.requests:.2f} requests/s; {live.late(answers)} sent late", flush=True)
    return run


async def _look(daemon: live.Daemon, most: list[int]) -> None:
    """Keep the highest use of the arena."""
    while True:
        status = await asyncio.to_thread(daemon.status)
        most[0] = max(most[0], status["arena"]["used_bytes"])
        await asyncio.sleep(LOOK_S)


def limits(report: Report) -> dict[str, float]:
    """Highest throughput of each set-up by its profile, in requests a second."""
    profile = emulation.read(PROFILE)
    model = profile.model
    assert model is not None
    patches = scenarios.patches(*scenarios.FULL_HD)
    tokens = ISL + IMAGES * patches // model.merge ** 2
    # An upper bound: decode steps between a prompt's chunks are left out.
    pd = sum(group.count / (tokens / group.prefill_tokens_per_s) for group in profile.pd)
    encoders = {ALONE: [group for group in profile.encoder if group.kind == "gpu"], BOTH: list(profile.encoder)}
    found = {}
    for setup, groups in encoders.items():
        encode = sum(group.count / group.image_seconds(patches) for group in groups) / IMAGES
        found[setup] = min(encode, pd)
        report.say(f"{setup}: at most {encode:.2f} requests/s encoded, {pd:.2f} prefilled ({tokens} tokens each).")
    return found


async def compare(args: argparse.Namespace, report: Report) -> None:
    most = limits(report)
    found = {(setup, rate): await measure(args, setup, rate) for rate in args.rates for setup in SETUPS}
    report.table(f"{IMAGES} images of 1080p, ISL {ISL}, OSL {OSL}, {args.requests} requests, {args.policy}",
                 ["offered/s", "set-up", "P99 TTFT s", "P99 TPOT ms", "tokens/s", "requests/s", "arena GiB, most"],
                 [[f"{rate:g}", setup, run.ttft, 1e3 * run.tpot, run.tokens, run.requests, run.arena_bytes / 2 ** 30]
                  for (setup, rate), run in found.items()])
    rows = []
    for rate in args.rates:
        alone, both = found[ALONE, rate], found[BOTH, rate]
        rows.append((rate, alone.ttft / both.ttft, alone.tpot / both.tpot, both.tokens / alone.tokens,
                     min(rate, most[BOTH]) / min(rate, most[ALONE])))
    report.table(f"how many times better {BOTH} is (target {TARGET:g})",
                 ["requests/s", "P99 TTFT", "P99 TPOT", "throughput", "throughput at most"],
                 [[f"{rate:g}", *ratios] for rate, *ratios in rows])
    for rate, ttft, tpot, throughput, bound in rows:
        if reasons := why(ttft, tpot, throughput, bound):
            report.say(f"{rate:g} requests/s: {' '.join(reasons)}")
    size = request_bytes()
    report.say(f"Embeddings: {size / 2 ** 20:.0f} MiB a request, {len(found) * args.requests * size / 2 ** 30:.0f} GiB "
               f"written and compared, through an arena of {args.arena_gib} GiB: requests for which it has no room "
               "wait before they are queued.")
    panels = [("P99 TTFT", "seconds", {key: run.ttft for key, run in found.items()}),
              ("P99 TPOT", "ms", {key: 1e3 * run.tpot for key, run in found.items()}),
              ("throughput", "tokens/s", {key: run.tokens for key, run in found.items()})]
    report.plot("published", f"{IMAGES} images of 1080p, ISL {ISL}, OSL {OSL} (emulated)", "requests/s", [
        Panel(title, unit, {setup: [(rate, values[setup, rate]) for rate in args.rates] for setup in SETUPS})
        for title, unit, values in panels])


def why(ttft: float, tpot: float, throughput: float, bound: float) -> list[str]:
    """Sentences on the results below the target; `bound`: how many times better throughput can be."""
    reasons = []
    if ttft < TARGET:
        reasons.append(f"TTFT {ttft:.2f} x: prefill, equal for both, is most of it.")
    if tpot < TARGET:
        reasons.append(f"TPOT {tpot:.2f} x: PD workers do not wait for encoders, so they only have more prompts beside "
                       "their decoding the more is encoded; their times are the profile's estimates.")
    if throughput < TARGET and bound < TARGET:
        reasons.append(f"Throughput {throughput:.2f} x, at most {bound:.2f}: one GPU encodes most of what comes.")
    elif throughput < TARGET:
        reasons.append(f"Throughput {throughput:.2f} x of {bound:.2f} at most: the first and last requests are counted "
                       "too, while nothing else runs; more requests come nearer.")
    return reasons


def request_bytes() -> int:
    """Bytes of one request's embeddings."""
    model = emulation.read(PROFILE).model
    assert model is not None
    rows = scenarios.patches(*scenarios.FULL_HD) // model.merge ** 2
    return IMAGES * rows * model.hidden * model.planes * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="requests/s")
    parser.add_argument("--requests", type=int, default=200, help="at each rate")
    parser.add_argument("--policy", default="earliest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=2.0, help="how many times faster than the profile")
    parser.add_argument("--arena-gib", type=int, default=8)
    parser.add_argument("--out", type=Path, help="folder for plots and numbers")
    args = parser.parse_args()
    report = Report(args.out)
    asyncio.run(compare(args, report))
    report.close(requests=args.requests, seed=args.seed, scale=args.scale, policy=args.policy)


if __name__ == "__main__":
    main()
