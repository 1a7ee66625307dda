"""Which image goes to which encoder, and when.  Pure: numbers and a `now` in, decisions out; no clock, no I/O.

The weighted rule (`budget`) is the published device-aware one: the CPU pool may have
B_cpu = I_gpu * N_cpu / (R * N_gpu) of work in flight, real-valued, and takes a job only below that.
I_gpu here also counts the jobs that wait in the common queue: late binding moved the GPU's own queue
there, and without it the rule would see only what the GPU holds at the moment and starve the CPUs.

`earliest` gives a free encoder the first waiting image that no faster one would finish sooner, were all that wait
before it done by the faster ones.  So a slow encoder neither makes a short queue wait for it nor stands idle beside
a long one, and the head of the queue always goes to the next fast one that is free.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, islice
from typing import NamedTuple

from epdd.dispatch.routing.queue import Job, Queue
from epdd.dispatch.routing.replicas import CPU, GPU, SECONDS_MIN, EncoderReplica, ReplicaSet

LOOK_AHEAD = 256        # jobs that `earliest` walks through: bounds the cost of a decision
NOT_WORTH = 1.1         # a lane this much faster is worth waiting for; nearly equal ones are not
RETHINK_S = 0.1         # an encoder that was left idle is looked at again: others may be late
TYPICAL_WEIGHT = 0.02   # how fast the typical image follows what comes: about the last fifty count
TYPICAL_CHANGE = 1.5    # a change by this factor sorts the lanes anew
FORGET_EVERY_S = 5.0    # how often old load is forgotten


class RoutingDecision(NamedTuple):
    """`job` goes to `lane`.  `reason` is for people."""

    job: Job
    lane: EncoderReplica
    reason: str


def cpu_budget(gpu_work: float, cpus: int, gpus: int, ratio: float) -> float:
    """B_cpu: what the CPU pool may have in flight beside `gpu_work`; infinite without GPUs."""
    return gpu_work * cpus / (ratio * gpus) if gpus else math.inf


class Router:
    """Queue, lanes and a policy.

    `slack` orders the queue: an image is due when it came plus `slack` times the seconds that the whole fleet needs
    for its request.  0 is first come first served; more lets small requests go before large ones, but none before
    one that came so much earlier: nobody starves.  So it is within a tenant; tenants take turns (`queue.py`).
    """

    def __init__(self, policy: str = "earliest", unit: str = "patch", ratio: float = 0.0, slack: float = 1.0,
                 ahead_s: float = 0.25, typical_patches: int = 1024) -> None:
        """`ratio` is R, 0: from the time models.  Encoders get the next image `ahead_s` before they are done."""
        self.queue = Queue()
        self.pools = ReplicaSet(unit, ahead_s, typical_patches)
        self._typical = float(typical_patches)
        self._waiting = 0.0
        self._turn = 0
        self._forgot = 0.0
        self._policies: dict[str, Callable[[Job, float], RoutingDecision | None]] = {
            "budget": self._budget, "earliest": self._earliest, "least-loaded": self._least_loaded,
            "round-robin": self._round_robin, "gpu-only": self._gpu_only}
        self.configure(policy, unit, ratio, slack, 0.0)

    def configure(self, policy: str, unit: str, ratio: float, slack: float, now: float) -> None:
        """Route by other rules from now on; what is in flight stays where it is, what waits keeps its place."""
        self.policy, self.slack, self.ratio_set = policy, slack, ratio
        self._pick = self._policies[policy]
        self.pools.by_load = policy != "earliest"
        self.pools.rebuild(now, unit)
        self._waiting = sum(job.cost(unit) for job in self.queue)

    # --- jobs

    def submit(self, job: Job, now: float) -> None:
        """A job comes."""
        job.queued = job.due = now
        if self.slack:
            rate = self.pools.typical_patches * sum(self.pools.rate.values())
            job.due += self.slack * (job.request_patches or job.patches) / rate if rate else 0.0
        if now - self._forgot >= FORGET_EVERY_S:
            self._forget(now)
        self._typical += TYPICAL_WEIGHT * (job.patches - self._typical)
        if not 1 / TYPICAL_CHANGE < self._typical / self.pools.typical_patches < TYPICAL_CHANGE:
            self.pools.typical_patches = max(1, round(self._typical))
            self.pools.rebuild(now)
        self._put(job)

    def _forget(self, now: float) -> None:
        self._forgot = now
        for lane in self.pools.lanes.values():
            lane.model.forget(now)
        self.pools.rebuild(now)

    def submit_again(self, job: Job, exclusive: bool) -> None:
        """A job comes back from a worker that did not do it: to its old place."""
        job.exclusive = exclusive
        job.left, job.worker = job.worker, None
        self._put(job)

    def _put(self, job: Job) -> None:
        self.queue.put(job)
        self._waiting += job.cost(self.pools.unit)

    def withdraw(self, job: Job) -> bool:
        """Nobody wants it any more; False if it does not wait."""
        if not self.queue.remove(job):
            return False
        self._waiting = self._waiting - job.cost(self.pools.unit) if self.queue else 0.0
        return True

    def take_all(self) -> list[Job]:
        """Empty the queue."""
        self._waiting = 0.0
        return self.queue.take_all()

    def assign(self, now: float) -> RoutingDecision | None:
        """The next job that can start, off the queue and on its lane; None: nothing until `wake_at`."""
        head = self.queue.head()
        if head is None:
            return None
        self.pools.advance(now)
        choice = self._go_alone(head, now) if head.exclusive else self._pick(head, now)
        if choice is None:
            return None
        self.withdraw(choice.job)
        job, lane = choice.job, choice.lane
        job.worker, job.started = lane.name, now
        self.pools.take(lane, job, now)
        self.queue.began(job)
        return choice

    def ended(self, job: Job, now: float) -> None:
        """Its lane is done with it, one way or the other."""
        assert job.worker is not None
        self.queue.ended(job)
        self.pools.let_go(self.pools.lanes[job.worker], job, now)

    def wake_at(self, now: float) -> float | None:
        """When to call `assign` again even if nothing happens; None: not needed."""
        if not self.queue:
            return None
        opens = self.pools.opens_at()
        rethink = now + RETHINK_S if self.pools.any_open else None
        return min((at for at in (opens, rethink) if at is not None), default=None)

    # --- numbers for people and for the rule

    @property
    def waiting(self) -> float:
        """Cost of what waits, in the unit."""
        return self._waiting

    def ratio_measured(self) -> float | None:
        """R from the time models: how many CPU lanes a GPU is worth for the typical image; None without both kinds.

        From mean rates, not mean times: R stands for what a pool can do, and one throttled worker of four
        takes away a quarter of that at most.
        """
        count, rate = self.pools.count, self.pools.rate
        if not count[CPU] or not count[GPU]:
            return None
        return (rate[GPU] / count[GPU]) / (rate[CPU] / count[CPU])

    def ratio(self) -> float:
        """R in force: set by the operator, else measured, else 1."""
        return self.ratio_set or self.ratio_measured() or 1.0

    def budget(self, waiting: float) -> float:
        """B_cpu now, with so much waiting."""
        count = self.pools.count
        if not count[GPU]:
            return math.inf
        return cpu_budget(self.pools.in_flight[GPU] + waiting, count[CPU], count[GPU], self.ratio())

    # --- policies: the next (job, lane), or None while it is better to wait

    def _go_alone(self, head: Job, now: float) -> RoutingDecision | None:
        """A job that was lost with a worker may have killed it: to an idle lane, and all wait until one is.

        To another one if there is one: what failed it may be that worker's own.
        """
        kinds = (GPU,) if self.policy == "gpu-only" and self.pools.count[GPU] else (GPU, CPU)
        idle = [lane for kind in kinds if (lane := self.pools.idle(kind, head.left))]
        if not idle:
            return None
        lane = min(idle, key=lambda lane: (lane.name == head.left, lane.finish(head, now)))
        return RoutingDecision(head, lane, "goes alone: it was lost with a worker")

    def _budget(self, head: Job, now: float) -> RoutingDecision | None:
        load, budget = self.pools.in_flight[CPU], self.budget(self._waiting - head.cost(self.pools.unit))
        below = load < budget
        lane = self.pools.first(CPU if below else GPU, now)
        if lane is not None:
            return RoutingDecision(head, lane, f"I_cpu {load:g} {'<' if below else '>='} B_cpu {budget:g}")
        # Going faster than the rule asks costs nobody: a free GPU never stands idle beside a full CPU pool.
        lane = self.pools.first(GPU, now) if below else None
        return RoutingDecision(head, lane, "CPU pool full, GPU free") if lane else None

    def _earliest(self, head: Job, now: float) -> RoutingDecision | None:
        candidates = self.pools.candidates(now)
        if not candidates:
            return None
        lane = min(candidates, key=lambda lane: lane.finish(head, now))
        rivals = self._rivals(lane, now)
        if rivals is None:
            return RoutingDecision(head, lane, "finishes first")
        remaining = lane.remaining(now)
        demands: dict[int, float] = {}      # patches to its size: what faster lanes do before this one is done
        before, job = 0, head
        for job in islice(self.queue, LOOK_AHEAD):
            demand = demands.get(job.patches)
            if demand is None:
                finish = remaining + lane.model.predict(job.patches)
                demand = demands[job.patches] = rivals.before(finish, job.patches)
            if before > demand:
                return RoutingDecision(job, lane, _why(before))
            before += job.patches
        # What lies beyond is taken to be like the last one seen.
        if len(self.queue) > LOOK_AHEAD and self.queue.patches - job.patches > demands[job.patches]:
            return RoutingDecision(job, lane, "finishes first: faster ones have the queue before it")
        return None

    def _rivals(self, lane: EncoderReplica, now: float) -> _Rivals | None:
        """The closed lanes that are faster than `lane`; None: there are none."""
        lanes, count = self.pools.faster(lane.seconds / NOT_WORTH)
        if not count:
            return None
        # What waits is what they would do.
        patches = max(1, self.queue.patches // len(self.queue))
        return _Rivals([(rival.remaining(now), patches / max(rival.model.predict(patches), SECONDS_MIN))
                        for rival in lanes], count / len(lanes))

    def _least_loaded(self, head: Job, now: float) -> RoutingDecision | None:
        lanes = [lane for lane in (self.pools.first(GPU, now), self.pools.first(CPU, now)) if lane]
        if not lanes:
            return None
        return RoutingDecision(head, min(lanes, key=lambda lane: (lane.in_flight, lane.seconds)), "least in flight")

    def _round_robin(self, head: Job, now: float) -> RoutingDecision | None:
        turns = self.pools.turns()
        if not turns:
            return None
        lane = turns[self._turn % len(turns)]
        if not self.pools.is_open(lane, now):
            return None
        self._turn += 1
        return RoutingDecision(head, lane, "its turn")

    def _gpu_only(self, head: Job, now: float) -> RoutingDecision | None:
        # Without a GPU there is nothing to prefer, and refusing all work would help nobody.
        kind = GPU if self.pools.count[GPU] else CPU
        lane = self.pools.first(kind, now)
        return RoutingDecision(head, lane, "GPUs only" if kind == GPU else "no GPU encoder here") if lane else None


class _Rivals:
    """Encoders that could do the job instead, by when they are free and their patches a second."""

    def __init__(self, lanes: list[tuple[float, float]], each: float) -> None:
        """`lanes`: (seconds until free, patches a second); each stands for so many."""
        lanes.sort()
        self._free = [free for free, _ in lanes]
        self._each = each
        # After i lanes: their patches a second, and what they have not done for being free late.
        self._rates = [0.0, *accumulate(rate for _, rate in lanes)]
        self._missed = [0.0, *accumulate(free * rate for free, rate in lanes)]

    def before(self, finish: float, patches: int) -> float:
        """Patches before an image of `patches` with which they would still be done with it within `finish` seconds.

        All that they do until then, less the image itself, less half an image for each lane but one: images are not
        divided, so lanes do not end together.
        """
        i = bisect_right(self._free, finish)
        done = finish * self._rates[i] - self._missed[i]
        return self._each * done - patches * (1 + self._each * i) / 2 if i else -1.0


def _why(before: int) -> str:
    if not before:
        return "finishes first: faster ones are busy"
    return f"finishes first: faster ones have {before} patches before it"
