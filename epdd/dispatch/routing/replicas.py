"""The encoders as the router sees them: what each holds, when it will be done, and which can take a job now.

Kept up to date change by change, so that a decision costs about the same with eight encoders and with a thousand.
Pure: numbers and a `now` that only goes forward; no clock, no I/O.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from epdd.dispatch.routing.queue import Job
from epdd.dispatch.routing.time_models import TimeModel

CPU, GPU = "cpu", "gpu"
DRIFT = 1e-6            # no job weighs so little: what is left of sums of fractions
SAMPLE_MAX = 16         # replicas that are looked at one by one in a decision
SECONDS_MIN = 1e-6      # no image takes less: a model fed by a stopped clock may say so

ReplicaEntry = tuple[float, int, "EncoderReplica"]       # sorted by the first two: no two replicas have the same number


class EncoderReplica:
    """One encoder."""

    def __init__(self, name: str, kind: str, model: TimeModel, number: int) -> None:
        self.name = name
        self.kind = kind                # "cpu" or "gpu"
        self.model = model
        self.number = number            # breaks ties as the fleet is listed
        self.taking = True              # False: finishes what it has and gets nothing new
        self.held: list[Job] = []       # handed over and not ended, oldest first
        self.in_flight = 0.0            # their cost, in the router's unit
        self.seconds = 0.0              # for an image of typical size
        self.places: list[tuple[list[ReplicaEntry], ReplicaEntry]] = []
        self._since = 0.0               # when it began the oldest
        self._first_s = 0.0             # predicted for the oldest,
        self._rest_s = 0.0              # and for those behind it

    @property
    def until(self) -> float:
        """When it is done with all it holds, by its time model."""
        return self._since + self._first_s + self._rest_s

    def remaining(self, now: float) -> float:
        """Seconds until it is done with all it holds.  What is late is taken to be as late again."""
        if not self.held:
            return 0.0
        return abs(self._since + self._first_s - now) + self._rest_s

    def finish(self, job: Job, now: float) -> float:
        """Seconds until it would be done with `job`, given now."""
        return self.remaining(now) + self.model.predict(job.patches)

    @property
    def alone(self) -> bool:
        """Whether it holds a job that may kill workers: the next one waits until that is over."""
        return bool(self.held) and self.held[-1].exclusive

    def take(self, job: Job, cost: float, now: float) -> None:
        seconds = self.model.predict(job.patches)
        if self.held:
            self._rest_s += seconds
        else:
            self._since, self._first_s, self._rest_s = now, seconds, 0.0
        self.held.append(job)
        self.in_flight += cost

    def let_go(self, job: Job, cost: float, now: float) -> None:
        first = self.held[0] is job
        self.held.remove(job)
        predicted = [self.model.predict(other.patches) for other in self.held]
        if first:
            self._since = now
        if predicted:
            self._first_s, self._rest_s = predicted[0], sum(predicted[1:])
        # Sums of fractions drift: an empty replica holds nothing.
        self.in_flight = self.in_flight - cost if self.held else 0.0


class ReplicaSet:
    """All replicas, sorted by what they can do now.

    Of those that take work, a replica is idle (holds nothing), open (is done within `ahead_s`: the next image can be
    handed over, to be prepared meanwhile) or closed.
    """

    def __init__(self, unit: str, ahead_s: float, typical_patches: int) -> None:
        self.unit = unit
        self.ahead_s = ahead_s
        self.typical_patches = typical_patches
        self.by_load = False                # open replicas: least loaded first, instead of first done first
        self.by_name: dict[str, EncoderReplica] = {}
        # Of the replicas that take work: cost in flight, how many, and typical images a second.
        self.in_flight = {CPU: 0.0, GPU: 0.0}
        self.count = {CPU: 0, GPU: 0}
        self.rate = {CPU: 0.0, GPU: 0.0}
        self._idle: dict[str, list[ReplicaEntry]] = {CPU: [], GPU: []}     # fastest first
        self._open: dict[str, list[ReplicaEntry]] = {CPU: [], GPU: []}
        self._closed: list[ReplicaEntry] = []      # fastest first
        self._opening: list[ReplicaEntry] = []     # the closed ones, first to open first
        self._turns: list[EncoderReplica] | None = None
        self._numbers = 0

    # --- the fleet

    def set_replica(self, name: str, kind: str, model: TimeModel, taking: bool, now: float) -> EncoderReplica:
        """Add a replica, or give it another time model or another will to work."""
        replica = self.by_name.get(name)
        if replica is None or replica.kind != kind and not replica.held:
            if replica is not None:
                self.drop_replica(name)
            replica = self.by_name[name] = EncoderReplica(name, kind, model, self._numbers)
            self._numbers += 1
        elif replica.model is model and replica.taking is taking:
            return replica
        self._forget(replica)
        replica.model, replica.taking = model, taking
        self._turns = None
        self._place(replica, now)
        return replica

    def drop_replica(self, name: str) -> None:
        """A replica that is no more; it must hold nothing."""
        replica = self.by_name.pop(name)
        assert not replica.held, "a replica that is gone still holds jobs"
        self._forget(replica)
        self._turns = None

    def take(self, replica: EncoderReplica, job: Job, now: float) -> None:
        """`job` is handed to `replica`."""
        self._forget(replica)
        replica.take(job, job.cost(self.unit), now)
        self._place(replica, now)

    def let_go(self, replica: EncoderReplica, job: Job, now: float) -> None:
        """`replica` is done with `job`, one way or the other."""
        self._forget(replica)
        replica.let_go(job, job.cost(self.unit), now)
        self._place(replica, now)

    def rebuild(self, now: float, unit: str | None = None) -> None:
        """Sort all replicas anew: after a change of unit, order or typical size."""
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
        if not replica.taking:
            return
        self._count_in(replica)
        if not replica.held:
            self._insert(replica, self._idle[replica.kind], replica.seconds)
        elif replica.until - self.ahead_s <= now and not replica.alone:
            key = replica.in_flight if self.by_load else replica.until + replica.seconds
            self._insert(replica, self._open[replica.kind], key)
        else:
            self._insert(replica, self._closed, replica.seconds)
            if not replica.alone:
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

    # --- what the policies look at

    def advance(self, now: float) -> None:
        """Open the replicas whose time has come."""
        while self._opening and self._opening[0][0] <= now:
            replica = self._opening[0][2]
            self._forget(replica)
            self._place(replica, now)

    def opens_at(self) -> float | None:
        """When the next closed replica opens."""
        return self._opening[0][0] if self._opening else None

    def idle(self, kind: str, but: str | None = None) -> EncoderReplica | None:
        """The fastest that holds nothing; the one of that name only if there is no other."""
        replicas = self._idle[kind]
        first = replicas[0][2] if replicas else None
        return next((replica for _, _, replica in replicas if replica.name != but), first)

    def open(self, kind: str, now: float) -> EncoderReplica | None:
        """The best of those that are nearly done."""
        entries = self._open[kind]
        while entries:
            replica = entries[0][2]
            if replica.remaining(now) <= self.ahead_s:
                return replica
            # Late, and likely to be later: it gets nothing more until it is done with something.
            self._forget(replica)
            self._count_in(replica)
            self._insert(replica, self._closed, replica.seconds)
        return None

    def first(self, kind: str, now: float) -> EncoderReplica | None:
        """The best that can take a job: the fastest idle one, else the best of the open ones."""
        return self.idle(kind) or self.open(kind, now)

    def candidates(self, now: float) -> list[EncoderReplica]:
        """The best of each kind and state: one of them is the first to finish a job, whatever its size."""
        found = (self.idle(GPU), self.open(GPU, now), self.idle(CPU), self.open(CPU, now))
        return [replica for replica in found if replica is not None]

    @property
    def any_open(self) -> bool:
        return any(self._idle.values()) or any(self._open.values())

    def is_open(self, replica: EncoderReplica, now: float) -> bool:
        return replica.taking and not replica.alone and replica.remaining(now) <= self.ahead_s

    def faster(self, seconds: float) -> tuple[list[EncoderReplica], int]:
        """Closed replicas that need less than `seconds` for an image of typical size, and how many there are.

        Of many only some, evenly spread: they stand for all, and a decision stays cheap.
        """
        count = bisect_left(self._closed, (seconds,))
        step = -(-count // SAMPLE_MAX) or 1
        return [replica for _, _, replica in self._closed[:count:step]], count

    def turns(self) -> list[EncoderReplica]:
        """Encoders that take work, as the fleet lists them."""
        if self._turns is None:
            self._turns = [replica for replica in self.by_name.values() if replica.taking]
        return self._turns
