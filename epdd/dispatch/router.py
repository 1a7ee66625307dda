"""Which encoder takes the next image.  Pure: numbers in, a decision out; no clock, no I/O.

The weighted rule (`budget`) is the published device-aware one: the CPU pool may have
B_cpu = I_gpu * N_cpu / (R * N_gpu) of work in flight, real-valued, and takes a job only below that.
I_gpu here also counts the jobs that wait in the common queue: late binding moved the GPU's own queue
there, and without it the rule would see only what the GPU holds at this moment and starve the CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

CPU, GPU = "cpu", "gpu"
LOOK_AHEAD = 64                     # jobs a worker that `earliest` thinks ahead: bounds the cost of a decision


@dataclass(frozen=True)
class Candidate:
    """An encoder as the router sees it.  Costs are in the configured unit."""

    name: str
    kind: str                       # "cpu" or "gpu"
    in_flight: float                # cost handed over and not ended
    free: bool                      # can take one more job now
    seconds_left: float = 0.0       # until what it holds is done, by its time model
    seconds_for_job: float = 0.0    # for this job, by its time model


@dataclass(frozen=True)
class Pools:
    """The fleet at this moment; only workers that take work."""

    candidates: Sequence[Candidate]
    ratio: float                    # R, GPU speed over CPU speed
    waiting: float = 0.0            # cost in the common queue, this job not counted
    cost: float = 1.0               # of this job

    def of(self, kind: str) -> list[Candidate]:
        return [c for c in self.candidates if c.kind == kind]

    def in_flight(self, kind: str) -> float:
        return sum(c.in_flight for c in self.of(kind))

    @property
    def cpu_budget(self) -> float:
        """B_cpu: what the CPU pool may have in flight; infinite without GPUs."""
        cpus, gpus = len(self.of(CPU)), len(self.of(GPU))
        if not gpus:
            return float("inf")
        return (self.in_flight(GPU) + self.waiting) * cpus / (self.ratio * gpus)


@dataclass(frozen=True)
class Choice:
    """`worker` is None: wait until something changes.  `reason` is for people."""

    worker: str | None
    reason: str


class Router:
    """A policy and the little it must remember (round-robin's turn)."""

    def __init__(self, policy: str = "budget") -> None:
        self.policy = policy
        self._turn = 0
        self._policies: dict[str, Callable[[Pools], Choice]] = {
            "budget": self._budget, "earliest": self._earliest, "least-loaded": self._least_loaded,
            "round-robin": self._round_robin, "gpu-only": self._gpu_only}

    def pick(self, pools: Pools) -> Choice:
        """The worker for the job at the head of the queue, or none yet.

        Choosing and counting must happen without an await between: the caller hands the job over at once.
        """
        if not pools.candidates:
            return Choice(None, "no encoder takes work")
        return self._policies[self.policy](pools)

    def _budget(self, pools: Pools) -> Choice:
        load, budget = pools.in_flight(CPU), pools.cpu_budget
        first, second = (CPU, GPU) if load < budget else (GPU, CPU)
        choice = _least_of(pools.of(first), f"I_cpu {load:g} {'<' if first == CPU else '>='} B_cpu {budget:g}")
        if choice.worker is None and second == GPU:
            # Going faster than the rule asks costs nobody: a free GPU never stands idle beside a full CPU pool.
            return _least_of(pools.of(GPU), "CPU pool full, GPU free")
        return choice

    def _earliest(self, pools: Pools) -> Choice:
        """The free worker that would be the first to get one of the waiting jobs, were all handed out now.

        The head alone would always wait for the fastest worker; it is the queue behind it that makes a slow
        one worth using.  The jobs behind are taken to be of this job's size.
        """
        jobs = min(1 + round(pools.waiting / pools.cost), LOOK_AHEAD * len(pools.candidates))
        finishes = [(c.seconds_left + c.seconds_for_job, c.name, c) for c in pools.candidates]
        heapify(finishes)
        for ahead in range(jobs):
            finish, name, best = finishes[0]
            if best.free:
                return Choice(name, f"finishes first, in {finish:.3f} s" if not ahead else
                              f"finishes in {finish:.3f} s, before the {ahead} jobs that faster workers would take")
            heapreplace(finishes, (finish + best.seconds_for_job, name, best))
        return Choice(None, f"{finishes[0][1]} is full and still the first to finish")

    def _least_loaded(self, pools: Pools) -> Choice:
        return _least_of(pools.candidates, "least in flight")

    def _round_robin(self, pools: Pools) -> Choice:
        chosen = pools.candidates[self._turn % len(pools.candidates)]
        if not chosen.free:
            return Choice(None, f"{chosen.name}'s turn and it is full")
        self._turn += 1
        return Choice(chosen.name, "its turn")

    def _gpu_only(self, pools: Pools) -> Choice:
        # Without a GPU there is nothing to prefer, and refusing all work would help nobody.
        gpus = pools.of(GPU)
        return _least_of(gpus or pools.candidates, "GPUs only" if gpus else "no GPU encoder here")


def _least_of(candidates: Sequence[Candidate], reason: str) -> Choice:
    """The free candidate with the least in flight."""
    free = [c for c in candidates if c.free]
    if not free:
        return Choice(None, f"{reason}; no free slot there")
    return Choice(min(free, key=lambda c: (c.in_flight, c.name)).name, reason)
