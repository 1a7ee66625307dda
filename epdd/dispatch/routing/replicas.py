"""The encoders as the router sees them: jobs in flight, when they will be done, and which encoder can take a job now.

Each change updates sorted lists, so a decision costs about the same with eight encoders and with a thousand.
Pure: numbers and a `now` that only goes forward; no clock, no I/O.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from epdd.dispatch.routing.queue import Job
from epdd.dispatch.routing.time_models import TimeModel

CPU, GPU = "cpu", "gpu"
DRIFT = 1e-6            # rounding error of sums of fractions: no job costs less
SAMPLE_MAX = 16         # replicas that a decision examines one by one
SECONDS_MIN = 1e-6      # least predicted time of an image: a model fed by a stopped clock may predict 0

ReplicaEntry = tuple[float, int, "EncoderReplica"]       # sorted by the first two: no two replicas have the same number


class EncoderReplica:
    """One encoder."""

    def __init__(self, name: str, kind: str, model: TimeModel, number: int) -> None:
        self.name = name
        self.kind = kind                # "cpu" or "gpu"
        self.model = model
        self.number = number            # breaks ties in the order of the fleet
        self.takes_work = True          # False: finishes its jobs and gets no new ones
        self.held: list[Job] = []       # jobs in flight, oldest first
        self.in_flight = 0.0            # their cost, in the router's unit
        self.seconds = 0.0              # for an image of typical size
        self.places: list[tuple[list[ReplicaEntry], ReplicaEntry]] = []     # lists of ReplicaSet that it is in
        self._since = 0.0               # when the oldest job began
        self._first_s = 0.0             # predicted for the oldest job,
        self._rest_s = 0.0              # and for the jobs behind it

    @property
    def until(self) -> float:
        """When its jobs will be done, by its time model."""
        return self._since + self._first_s + self._rest_s

    def remaining(self, now: float) -> float:
        """Seconds until its jobs are done.  A job that is late is expected to take as long again as it is late."""
        if not self.held:
            return 0.0
        return abs(self._since + self._first_s - now) + self._rest_s

    def finish(self, job: Job, now: float) -> float:
        """Seconds until `job` would be done if it got it now."""
        return self.remaining(now) + self.model.predict(job.patches)

    @property
    def exclusive(self) -> bool:
        """Whether it has a job that may crash it: the next job waits until that one has ended."""
        return bool(self.held) and self.held[-1].exclusive

    def take(self, job: Job, cost: float, now: float) -> None:
        seconds = self.model.predict(job.patches)
        if self.held:
            self._rest_s += seconds
        else:
            self._since, self._first_s, self._rest_s = now, seconds, 0.0
        self.held.append(job)
        self.in_flight += cost

    def release(self, job: Job, cost: float, now: float) -> None:
        first = self.held[0] is job
        self.held.remove(job)
        predicted = [self.model.predict(other.patches) for other in self.held]
        if first:
            self._since = now
        if predicted:
            self._first_s, self._rest_s = predicted[0], sum(predicted[1:])
        # Without jobs, set 0: sums of fractions have rounding errors.
        self.in_flight = self.in_flight - cost if self.held else 0.0


class ReplicaSet:
    """All replicas, in lists sorted for the policies.

    A replica that takes work is idle (no job), open (done within `ahead_s`, so it can get the next image and prepare it
    meanwhile) or closed.
    """

    def __init__(self, unit: str, ahead_s: float, typical_patches: int) -> None:
        self.unit = unit
        self.ahead_s = ahead_s
        self.typical_patches = typical_patches
        self.by_load = False                # open replicas: least loaded first, instead of first done first
        self.by_name: dict[str, EncoderReplica] = {}
        # Of the replicas that take work: cost in flight, number, and typical images a second.
        self.in_flight = {CPU: 0.0, GPU: 0.0}
        self.count = {CPU: 0, GPU: 0}
        self.rate = {CPU: 0.0, GPU: 0.0}
        self._idle: dict[str, list[ReplicaEntry]] = {CPU: [], GPU: []}     # fastest first
        self._open: dict[str, list[ReplicaEntry]] = {CPU: [], GPU: []}
        self._closed: list[ReplicaEntry] = []      # fastest first
        self._opening: list[ReplicaEntry] = []     # the closed ones, first to open first
        self._in_service: list[EncoderReplica] | None = None
        self._numbers = 0

    # --- the fleet

    def set_replica(self, name: str, kind: str, model: TimeModel, takes_work: bool, now: float) -> EncoderReplica:
        """Add a replica, or change its time model or whether it takes work."""
        replica = self.by_name.get(name)
        if replica is None or replica.kind != kind and not replica.held:
            if replica is not None:
                self.drop_replica(name)
            replica = self.by_name[name] = EncoderReplica(name, kind, model, self._numbers)
            self._numbers += 1
        elif replica.model is model and replica.takes_work is takes_work:
            return replica
        self._forget(replica)
        replica.model, replica.takes_work = model, takes_work
        self._in_service = None
        self._place(replica, now)
        return replica

    def drop_replica(self, name: str) -> None:
        """Remove a replica; it must have no jobs."""
        replica = self.by_name.pop(name)
        assert not replica.held, "a removed replica has jobs in flight"
        self._forget(replica)
        self._in_service = None

    def take(self, replica: EncoderReplica, job: Job, now: float) -> None:
        """`job` is handed to `replica`."""
        self._forget(replica)
        replica.take(job, job.cost(self.unit), now)
        self._place(replica, now)

    def release(self, replica: EncoderReplica, job: Job, now: float) -> None:
        """`replica` has ended `job`, well or not."""
        self._forget(replica)
        replica.release(job, job.cost(self.unit), now)
        self._place(replica, now)

    def rebuild(self, now: float, unit: str | None = None) -> None:
        """Sort all replicas anew, after a change of unit, order or typical size."""
        replicas = list(self.by_name.values())
        for replica in replicas:
            self._forget(replica)
        self.unit = unit or self.unit
        for replica in replicas:
            replica.in_flight = sum(job.cost(self.unit) for job in replica.held)
            self._place(replica, now)

    def _forget(self, replica: EncoderReplica) -> None:
        for entries, entry in replica.places:
            del entries[bisect_left(entries, entry)]
        if replica.places:
            self.count[replica.kind] -= 1
            left = self.in_flight[replica.kind] - replica.in_flight
            self.in_flight[replica.kind] = left if left > DRIFT else 0.0
            rate = self.rate[replica.kind] - 1.0 / replica.seconds
            self.rate[replica.kind] = rate if self.count[replica.kind] else 0.0
        replica.places = []

    def _place(self, replica: EncoderReplica, now: float) -> None:
        if not replica.takes_work:
            return
        self._count_in(replica)
        if not replica.held:
            self._insert(replica, self._idle[replica.kind], replica.seconds)
        elif replica.until - self.ahead_s <= now and not replica.exclusive:
            key = replica.in_flight if self.by_load else replica.until + replica.seconds
            self._insert(replica, self._open[replica.kind], key)
        else:
            self._insert(replica, self._closed, replica.seconds)
            if not replica.exclusive:
                self._insert(replica, self._opening, replica.until - self.ahead_s)

    def _count_in(self, replica: EncoderReplica) -> None:
        self.count[replica.kind] += 1
        self.in_flight[replica.kind] += replica.in_flight
        replica.seconds = max(replica.model.predict(self.typical_patches), SECONDS_MIN)
        self.rate[replica.kind] += 1.0 / replica.seconds

    def _insert(self, replica: EncoderReplica, entries: list[ReplicaEntry], key: float) -> None:
        entry = (key, replica.number, replica)
        insort(entries, entry)
        replica.places.append((entries, entry))

    # --- what policies use

    def advance(self, now: float) -> None:
        """Move closed replicas that are now within `ahead_s` of their end to the open ones."""
        while self._opening and self._opening[0][0] <= now:
            replica = self._opening[0][2]
            self._forget(replica)
            self._place(replica, now)

    def opens_at(self) -> float | None:
        """When the next closed replica opens."""
        return self._opening[0][0] if self._opening else None

    def idle(self, kind: str, but: str | None = None) -> EncoderReplica | None:
        """The fastest idle one; the one named `but` only if there is no other."""
        replicas = self._idle[kind]
        first = replicas[0][2] if replicas else None
        return next((replica for _, _, replica in replicas if replica.name != but), first)

    def open(self, kind: str, now: float) -> EncoderReplica | None:
        """The best open one."""
        entries = self._open[kind]
        while entries:
            replica = entries[0][2]
            if replica.remaining(now) <= self.ahead_s:
                return replica
            # It is late and may stay so: closed until one of its jobs ends.
            self._forget(replica)
            self._count_in(replica)
            self._insert(replica, self._closed, replica.seconds)
        return None

    def first(self, kind: str, now: float) -> EncoderReplica | None:
        """The fastest idle one, else the best open one."""
        return self.idle(kind) or self.open(kind, now)

    def candidates(self, now: float) -> list[EncoderReplica]:
        """The best of each kind and state: one of them finishes any job first, whatever its size."""
        found = (self.idle(GPU), self.open(GPU, now), self.idle(CPU), self.open(CPU, now))
        return [replica for replica in found if replica is not None]

    @property
    def any_open(self) -> bool:
        return any(self._idle.values()) or any(self._open.values())

    def is_open(self, replica: EncoderReplica, now: float) -> bool:
        return replica.takes_work and not replica.exclusive and replica.remaining(now) <= self.ahead_s

    def faster(self, seconds: float) -> tuple[list[EncoderReplica], int]:
        """Closed replicas that need less than `seconds` for an image of typical size, and how many there are.

        Returns at most SAMPLE_MAX of them, evenly spread, so that a decision stays cheap.
        """
        count = bisect_left(self._closed, (seconds,))
        step = -(-count // SAMPLE_MAX) or 1
        return [replica for _, _, replica in self._closed[:count:step]], count

    def in_service(self) -> list[EncoderReplica]:
        """Replicas that take work, in the order of the fleet."""
        if self._in_service is None:
            self._in_service = [replica for replica in self.by_name.values() if replica.takes_work]
        return self._in_service
