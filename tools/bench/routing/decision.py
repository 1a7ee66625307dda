"""CPU time of routing: of a decision (`Router.assign`), and of all calls for an image (submit, ended, decisions).

    python -m tools.bench.routing.decision

For each policy, 8 and 1,000 encoders, and queues of 1 to 2,000 images.  All encoders are busy; when one finishes,
another image arrives.  Time is CPU time, so other processes do not count.  The last column is the mean divided by the
time of a lookup in a dict of a thousand, measured in the same run, so that machines can be compared.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import timeit
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean

from tools.bench.report import Cell, Report
from tools.simulate.simulator import percentile

from epdd.dispatch.routing.queue import Job
from epdd.dispatch.routing.router import Router, RoutingDecision
from epdd.dispatch.routing.time_models import TimeModel

POLICIES = ["budget", "earliest", "least-loaded", "round-robin", "gpu-only"]
FLEETS = {8: 20.0, 1000: 100.0}         # encoders -> microseconds that a decision may take
QUEUES = [1, 20, 200, 2000]
SIZES = [256, 784, 1900, 3520, 4096, 8160, 14400, 32640]
GPU_SHARE = 0.2
AHEAD_S = 0.25


class Fleet:
    """A busy fleet and a queue of constant length."""

    def __init__(self, policy: str, encoders: int, queue: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._router = Router(policy, "patch", 0.0, 1.0, AHEAD_S, 4096)
        self._queue = queue
        self.now = 0.0
        self._ends: list[tuple[float, int, Job]] = []
        for i in range(encoders):
            kind = "gpu" if i < GPU_SHARE * encoders else "cpu"
            each = (1.35e-5 if kind == "gpu" else 1.62e-4) * self._rng.uniform(0.9, 1.1)
            self._router.replicas.set_replica(f"{kind}{i}", kind, TimeModel([(4096, 4096 * each)]), True, 0.0)
        self._busy: dict[str, float] = {}
        self._looking = looking()
        self.decisions: list[float] = []        # seconds computed for each
        for _ in range(queue + encoders):
            self._router.submit(self._job(), self.now)
        self._decide()

    def _job(self) -> Job:
        images = self._rng.randint(1, 8)
        patches = self._rng.choice(SIZES)
        return Job("r", patches, images, patches * images)

    def image(self) -> float:
        """CPU seconds of one image's end, another one's arrival and all decisions until the next end."""
        spent = 0.0
        wake = self._router.wake_at(self.now)
        while self._ends and wake is not None and wake < self._ends[0][0]:
            self.now = wake
            spent += self._decide()
            wake = self._router.wake_at(self.now)
        self.now, _, done = heappop(self._ends)
        come = self._job() if len(self._router.queue) <= self._queue else None
        began = time.thread_time()
        self._router.ended(done, self.now)
        if come is not None:
            self._router.submit(come, self.now)
        return spent + max(0.0, time.thread_time() - began - self._looking) + self._decide()

    def _decide(self) -> float:
        router, now, spent = self._router, self.now, 0.0
        choices: list[RoutingDecision | None] = []
        while not choices or choices[-1] is not None:
            began = time.thread_time()
            choices.append(router.assign(now))
            self.decisions.append(max(0.0, time.thread_time() - began - self._looking))
            spent += self.decisions[-1]
        for choice in choices[:-1]:
            assert choice is not None
            job, replica = choice.job, choice.replica
            start = max(now, self._busy.get(replica.name, 0.0))
            end = self._busy[replica.name] = start + replica.model.predict(job.patches) * self._rng.uniform(0.95, 1.05)
            heappush(self._ends, (end, job.number, job))
        return spent


def measure(policy: str, encoders: int, queue: int, images: int) -> tuple[list[float], list[float]]:
    """Microseconds of each decision, and of each image."""
    fleet = Fleet(policy, encoders, queue, seed=1)
    for _ in range(images // 10):
        fleet.image()
    fleet.decisions.clear()
    gc.collect()
    each = [1e6 * fleet.image() for _ in range(images)]
    return [1e6 * seconds for seconds in fleet.decisions], each


def looking() -> float:
    """Seconds between two readings of the clock."""
    found = []
    for _ in range(1000):
        began = time.thread_time()
        found.append(time.thread_time() - began)
    return percentile(found, 0.5)


def lookup() -> float:
    """Microseconds of a lookup in a dict of a thousand, by equal but not identical keys."""
    names = {f"encoder/{i}": i for i in range(1000)}
    asked = [f"encoder/{i}" for i in range(1000)]
    runs = timeit.repeat(lambda: [names[name] for name in asked], number=200, repeat=5, timer=time.thread_time)
    return 1e6 * min(runs) / 200 / len(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000, help="of each line")
    parser.add_argument("--out", type=Path, help="folder for the numbers")
    args = parser.parse_args()
    report, per_lookup = Report(args.out), lookup()
    rows: list[Sequence[Cell]] = []
    missed = []
    for encoders, limit in FLEETS.items():
        for policy in POLICIES:
            for queue in QUEUES:
                decisions, images = measure(policy, encoders, queue, args.images)
                mean = fmean(decisions)
                rows.append([policy, encoders, queue, mean, percentile(decisions, 0.99), mean / per_lookup,
                             fmean(images), percentile(images, 0.99)])
                if mean > limit:
                    missed.append(f"{policy} with {encoders} encoders and {queue} waiting: {mean:.1f} > {limit:g}")
    report.table(f"microseconds; a dict lookup takes {per_lookup:.3f}",
                 ["policy", "encoders", "waiting", "a decision", "p99", "in lookups", "all of an image", "p99"], rows)
    for line in missed or ["all within " + ", ".join(f"{limit:g} with {n}" for n, limit in FLEETS.items())]:
        report.say(line)
    report.close()
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
