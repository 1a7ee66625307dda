"""Which image goes to which encoder, and when.  Pure: numbers and a `now` in, decisions out; no clock, no I/O.

`budget` is the weighted rule of the Intel and SGLang teams ("heterogeneous CPU + GPU EPD", LMSYS blog, 2026-06-01): the
CPU encoders get a job only while they have less than B_cpu = I_gpu * N_cpu / (R * N_gpu) of work in flight.  I_gpu here
also counts the queue: with late binding, jobs wait in the common queue and not on the GPUs.

`earliest`: an idle encoder takes the first queued image that no faster encoder would finish sooner, counting the images
ahead of it.  Fast encoders therefore serve the head of the queue, slow ones serve from further back.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, islice
from typing import NamedTuple

from epdd.dispatch.routing.queue import Job, Queue
from epdd.dispatch.routing.replicas import CPU, GPU, SECONDS_MIN, EncoderReplica, ReplicaSet

LOOK_AHEAD = 256        # jobs that `earliest` examines: limits the cost of a decision
FASTER_MIN = 1.1        # a job waits only for replicas that are faster by this factor
RETHINK_S = 0.1         # while an encoder is left idle, decide again after this time: others may be late
TYPICAL_WEIGHT = 0.02   # of a new image in the running mean of sizes: about the last fifty count
TYPICAL_CHANGE = 1.5    # if the mean changes by this factor, replicas are sorted anew
FORGET_EVERY_S = 5.0    # how often time models forget old measurements


class RoutingDecision(NamedTuple):
    """`job` goes to `replica`; `reason` is shown by `epdctl explain`."""

    job: Job
    replica: EncoderReplica
    reason: str


def cpu_budget(gpu_work: float, cpus: int, gpus: int, ratio: float) -> float:
    """B_cpu: the limit of work in flight on CPU encoders beside `gpu_work`; infinite without GPUs."""
    return gpu_work * cpus / (ratio * gpus) if gpus else math.inf


class Router:
    """Queue, replicas and a policy.

    `slack` orders the queue within a tenant: an image is due at its arrival plus `slack` times the seconds that the
    whole fleet needs for its request.  0 is first come first served.  With more, small requests pass large ones, up to
    that time, so no request starves.  `queue.py` shares the encoders between tenants.
    """

    def __init__(self, policy: str = "earliest", unit: str = "patch", ratio: float = 0.0, slack: float = 1.0,
                 ahead_s: float = 0.25, typical_patches: int = 1024) -> None:
        """`ratio` is R; 0: by the time models.  Encoders get the next image `ahead_s` before they are done."""
        self.queue = Queue()
        self.replicas = ReplicaSet(unit, ahead_s, typical_patches)
        self._typical = float(typical_patches)
        self._waiting = 0.0
        self._turn = 0
        self._forgot = 0.0
        self._policies: dict[str, Callable[[Job, float], RoutingDecision | None]] = {
            "budget": self._budget, "earliest": self._earliest, "least-loaded": self._least_loaded,
            "round-robin": self._round_robin, "gpu-only": self._gpu_only}
        self.configure(policy, unit, ratio, slack, 0.0)

    def configure(self, policy: str, unit: str, ratio: float, slack: float, now: float) -> None:
        """Change the settings; jobs in flight stay where they are, queued jobs keep their place."""
        self.policy, self.slack, self.ratio_set = policy, slack, ratio
        self._pick = self._policies[policy]
        self.replicas.by_load = policy != "earliest"
        self.replicas.rebuild(now, unit)
        self._waiting = sum(job.cost(unit) for job in self.queue)

    # --- jobs

    def submit(self, job: Job, now: float) -> None:
        """Queue a new job."""
        job.queued = job.due = now
        if self.slack:
            rate = self.replicas.typical_patches * sum(self.replicas.rate.values())
            job.due += self.slack * (job.request_patches or job.patches) / rate if rate else 0.0
        if now - self._forgot >= FORGET_EVERY_S:
            self._forget(now)
        self._typical += TYPICAL_WEIGHT * (job.patches - self._typical)
        if not 1 / TYPICAL_CHANGE < self._typical / self.replicas.typical_patches < TYPICAL_CHANGE:
            self.replicas.typical_patches = max(1, round(self._typical))
            self.replicas.rebuild(now)
        self._put(job)

    def _forget(self, now: float) -> None:
        self._forgot = now
        for replica in self.replicas.by_name.values():
            replica.model.forget(now)
        self.replicas.rebuild(now)

    def submit_again(self, job: Job, exclusive: bool) -> None:
        """Queue a job again, at its old place, that its worker did not finish."""
        job.exclusive = exclusive
        job.left, job.worker = job.worker, None
        self._put(job)

    def _put(self, job: Job) -> None:
        self.queue.put(job)
        self._waiting += job.cost(self.replicas.unit)

    def withdraw(self, job: Job) -> bool:
        """Take a job out of the queue; False if it is not queued."""
        if not self.queue.remove(job):
            return False
        self._waiting = self._waiting - job.cost(self.replicas.unit) if self.queue else 0.0
        return True

    def take_all(self) -> list[Job]:
        """Empty the queue."""
        self._waiting = 0.0
        return self.queue.take_all()

    def assign(self, now: float) -> RoutingDecision | None:
        """Move the next job that can start from the queue to a replica; None: none can until `wake_at`."""
        head = self.queue.head()
        if head is None:
            return None
        self.replicas.advance(now)
        choice = self._exclusive(head, now) if head.exclusive else self._pick(head, now)
        if choice is None:
            return None
        self.withdraw(choice.job)
        job, replica = choice.job, choice.replica
        job.worker, job.started = replica.name, now
        self.replicas.take(replica, job, now)
        self.queue.began(job)
        return choice

    def ended(self, job: Job, now: float) -> None:
        """Its replica has ended the job, well or not."""
        assert job.worker is not None
        self.queue.ended(job)
        self.replicas.release(self.replicas.by_name[job.worker], job, now)

    def wake_at(self, now: float) -> float | None:
        """When to call `assign` again without another event; None: not needed."""
        if not self.queue:
            return None
        opens = self.replicas.opens_at()
        rethink = now + RETHINK_S if self.replicas.any_open else None
        return min((at for at in (opens, rethink) if at is not None), default=None)

    # --- numbers for status and for `budget`

    @property
    def waiting(self) -> float:
        """Cost of the queue, in the unit."""
        return self._waiting

    def ratio_measured(self) -> float | None:
        """R by the time models: how many CPU replicas a GPU is worth for the typical image; None without both kinds.

        Of mean rates, not mean times: one throttled worker of four lowers a mean rate by at most a quarter.
        """
        count, rate = self.replicas.count, self.replicas.rate
        if not count[CPU] or not count[GPU]:
            return None
        return (rate[GPU] / count[GPU]) / (rate[CPU] / count[CPU])

    def ratio(self) -> float:
        """R in force: set by the operator, else measured, else 1."""
        return self.ratio_set or self.ratio_measured() or 1.0

    def budget(self, waiting: float) -> float:
        """B_cpu now, with `waiting` in the queue."""
        count = self.replicas.count
        if not count[GPU]:
            return math.inf
        return cpu_budget(self.replicas.in_flight[GPU] + waiting, count[CPU], count[GPU], self.ratio())

    # --- policies: the next (job, replica), or None while it is better to wait

    def _exclusive(self, head: Job, now: float) -> RoutingDecision | None:
        """A job that was lost with a worker may crash the next: it goes to an idle replica, and all jobs wait for one.

        It goes to another worker if there is one: the fault may be that worker's.
        """
        kinds = (GPU,) if self.policy == "gpu-only" and self.replicas.count[GPU] else (GPU, CPU)
        idle = [replica for kind in kinds if (replica := self.replicas.idle(kind, head.left))]
        if not idle:
            return None
        replica = min(idle, key=lambda replica: (replica.name == head.left, replica.finish(head, now)))
        return RoutingDecision(head, replica, "goes alone: it was lost with a worker")

    def _budget(self, head: Job, now: float) -> RoutingDecision | None:
        load, budget = self.replicas.in_flight[CPU], self.budget(self._waiting - head.cost(self.replicas.unit))
        below = load < budget
        replica = self.replicas.first(CPU if below else GPU, now)
        if replica is not None:
            return RoutingDecision(head, replica, f"I_cpu {load:g} {'<' if below else '>='} B_cpu {budget:g}")
        # Beyond the rule: a GPU does not stay idle while all CPU encoders are busy.
        replica = self.replicas.first(GPU, now) if below else None
        return RoutingDecision(head, replica, "CPU pool full, GPU free") if replica else None

    def _earliest(self, head: Job, now: float) -> RoutingDecision | None:
        candidates = self.replicas.candidates(now)
        if not candidates:
            return None
        replica = min(candidates, key=lambda replica: replica.finish(head, now))
        rivals = self._rivals(replica, now)
        if rivals is None:
            return RoutingDecision(head, replica, "finishes first")
        remaining = replica.remaining(now)
        demands: dict[int, float] = {}      # image size -> patches that faster replicas do before this one is done
        before, job = 0, head
        for job in islice(self.queue, LOOK_AHEAD):
            demand = demands.get(job.patches)
            if demand is None:
                finish = remaining + replica.model.predict(job.patches)
                demand = demands[job.patches] = rivals.before(finish, job.patches)
            if before > demand:
                return RoutingDecision(job, replica, _why(before))
            before += job.patches
        # The images beyond are assumed to be like the last one examined.
        if len(self.queue) > LOOK_AHEAD and self.queue.patches - job.patches > demands[job.patches]:
            return RoutingDecision(job, replica, "finishes first: faster ones have the queue before it")
        return None

    def _rivals(self, replica: EncoderReplica, now: float) -> _Rivals | None:
        """The closed replicas that are faster than `replica`; None: there are none."""
        replicas, count = self.replicas.faster(replica.seconds / FASTER_MIN)
        if not count:
            return None
        # Their rates are those for the mean size in the queue.
        patches = max(1, self.queue.patches // len(self.queue))
        return _Rivals([(rival.remaining(now), patches / max(rival.model.predict(patches), SECONDS_MIN))
                        for rival in replicas], count / len(replicas))

    def _least_loaded(self, head: Job, now: float) -> RoutingDecision | None:
        replicas = [replica for replica in (self.replicas.first(GPU, now), self.replicas.first(CPU, now)) if replica]
        if not replicas:
            return None
        least = min(replicas, key=lambda replica: (replica.in_flight, replica.seconds))
        return RoutingDecision(head, least, "least in flight")

    def _round_robin(self, head: Job, now: float) -> RoutingDecision | None:
        replicas = self.replicas.in_service()
        if not replicas:
            return None
        replica = replicas[self._turn % len(replicas)]
        if not self.replicas.is_open(replica, now):
            return None
        self._turn += 1
        return RoutingDecision(head, replica, "its turn")

    def _gpu_only(self, head: Job, now: float) -> RoutingDecision | None:
        # Without a GPU the CPUs encode: the alternative is to refuse every image.
        kind = GPU if self.replicas.count[GPU] else CPU
        replica = self.replicas.first(kind, now)
        reason = "GPUs only" if kind == GPU else "no GPU encoder here"
        return RoutingDecision(head, replica, reason) if replica else None


class _Rivals:
    """Faster encoders that could do the job instead: when they are free, and their patches a second."""

    def __init__(self, replicas: list[tuple[float, float]], each: float) -> None:
        """`replicas`: (seconds until free, patches a second); each stands for `each` replicas."""
        replicas.sort()
        self._free = [free for free, _ in replicas]
        self._each = each
        # Of the first i replicas: patches a second, and the patches that they miss because they are not free at once.
        self._rates = [0.0, *accumulate(rate for _, rate in replicas)]
        self._missed = [0.0, *accumulate(free * rate for free, rate in replicas)]

    def before(self, finish: float, patches: int) -> float:
        """How many patches may be queued ahead of an image so that the rivals still finish it within `finish` seconds.

        All that they do until then, less the image itself, less half an image for each replica but one: images are not
        divided, so replicas do not end together.
        """
        i = bisect_right(self._free, finish)
        done = finish * self._rates[i] - self._missed[i]
        return self._each * done - patches * (1 + self._each * i) / 2 if i else -1.0


def _why(before: int) -> str:
    if not before:
        return "finishes first: faster ones are busy"
    return f"finishes first: faster ones have {before} patches before it"
