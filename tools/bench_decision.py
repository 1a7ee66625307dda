"""What a routing decision costs: submit, assign and ended of one image, in microseconds.

    python tools/bench_decision.py

For each policy, 8 and 1,000 encoders, and queues of 1 to 2,000 images.  Fleets are loaded: each lane works, and as one
is done another image comes.  Time is the CPU's, not the wall's: neighbours do not count.  The last column is the mean
over a lookup in a dict of a thousand, timed in the same run, so that different machines can be compared.
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

from report import Cell, Report
from simulator import percentile

from epdd.dispatch.queue import Job
from epdd.dispatch.router import Router
from epdd.dispatch.timing import TimeModel

POLICIES = ["budget", "earliest", "least-loaded", "round-robin", "gpu-only"]
FLEETS = {8: 20.0, 1000: 100.0}         # encoders, and the microseconds that a decision may take on average
QUEUES = [1, 20, 200, 2000]
SIZES = [256, 784, 1900, 3520, 4096, 8160, 14400, 32640]
GPU_SHARE = 0.2
AHEAD_S = 0.25


class House:
    """A fleet at work and a queue that stays about as long as it is."""

    def __init__(self, policy: str, encoders: int, queue: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._router = Router(policy, "patch", 0.0, 1.0, AHEAD_S, 4096)
        self._queue = queue
        self.now = 0.0
        self._ends: list[tuple[float, int, Job]] = []
        for i in range(encoders):
            kind = "gpu" if i < GPU_SHARE * encoders else "cpu"
            each = (1.35e-5 if kind == "gpu" else 1.62e-4) * self._rng.uniform(0.9, 1.1)
            self._router.pools.set_lane(f"{kind}{i}", kind, TimeModel([(4096, 4096 * each)]), True, 0.0)
        self._busy: dict[str, float] = {}
        for _ in range(queue + encoders):
            self._router.submit(self._job(), self.now)
        self._hand_over()

    def _job(self) -> Job:
        images = self._rng.randint(1, 8)
        patches = self._rng.choice(SIZES)
        return Job("r", patches, images, patches * images)

    def _hand_over(self) -> float:
        """All that can start now; seconds it computed, this class's own bookkeeping left out."""
        spent, router = 0.0, self._router
        while True:
            began = time.thread_time()
            choice = router.assign(self.now)
            spent += time.thread_time() - began
            if choice is None:
                return spent
            job, lane = choice.job, choice.lane
            start = max(self.now, self._busy.get(lane.name, 0.0))
            end = self._busy[lane.name] = start + lane.model.predict(job.patches) * self._rng.uniform(0.95, 1.05)
            heappush(self._ends, (end, job.number, job))

    def decision(self) -> float:
        """Seconds computed for the next image's end, the next image's coming and what can start then."""
        router = self._router
        wake = router.wake_at(self.now)
        spent = 0.0
        while self._ends and wake is not None and wake < self._ends[0][0]:
            self.now = wake
            spent += self._hand_over()
            wake = router.wake_at(self.now)
        done = None
        if self._ends:
            self.now, _, done = heappop(self._ends)
        come = [self._job() for _ in range(max(0, self._queue + 1 - len(router.queue)))][:1]
        began = time.thread_time()
        if done is not None:
            router.ended(done, self.now)
        for job in come:
            router.submit(job, self.now)
        return spent + time.thread_time() - began + self._hand_over()


def measure(policy: str, encoders: int, queue: int, decisions: int) -> list[float]:
    """Microseconds of each decision."""
    house = House(policy, encoders, queue, seed=1)
    for _ in range(decisions // 10):
        house.decision()
    gc.collect()
    return [1e6 * house.decision() for _ in range(decisions)]


def lookup() -> float:
    """Microseconds of a lookup in a dict of a thousand, by names that are not the stored objects."""
    names = {f"encoder/{i}": i for i in range(1000)}
    asked = [f"encoder/{i}" for i in range(1000)]
    runs = timeit.repeat(lambda: [names[name] for name in asked], number=200, repeat=5, timer=time.thread_time)
    return 1e6 * min(runs) / 200 / len(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=4000, help="of each line")
    parser.add_argument("--out", type=Path, help="folder for the numbers")
    args = parser.parse_args()
    report, per_lookup = Report(args.out), lookup()
    rows: list[Sequence[Cell]] = []
    missed = []
    for encoders, limit in FLEETS.items():
        for policy in POLICIES:
            for queue in QUEUES:
                spent = measure(policy, encoders, queue, args.decisions)
                mean = sum(spent) / len(spent)
                rows.append([policy, encoders, queue, mean, percentile(spent, 0.5), percentile(spent, 0.99),
                             mean / per_lookup])
                if mean > limit:
                    missed.append(f"{policy} with {encoders} encoders and {queue} waiting: {mean:.1f} > {limit:g}")
    report.table(f"microseconds of a decision; a dict lookup takes {per_lookup:.3f}",
                 ["policy", "encoders", "waiting", "mean", "p50", "p99", "mean / lookup"], rows)
    for line in missed or ["all within " + ", ".join(f"{limit:g} with {n}" for n, limit in FLEETS.items())]:
        report.say(line)
    report.close()
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
