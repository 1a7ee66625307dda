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
SAMPLE_MAX = 16         # lanes that are looked at one by one in a decision
SECONDS_MIN = 1e-6      # no image takes less: a model fed by a stopped clock may say so

ReplicaEntry = tuple[float, int, "EncoderReplica"]       # sorted by the first two: no two lanes have the same number


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
        # Sums of fractions drift: an empty lane holds nothing.
        self.in_flight = self.in_flight - cost if self.held else 0.0


class ReplicaSet:
    """All lanes, sorted by what they can do now.

    Of those that take work, a lane is idle (holds nothing), open (is done within `ahead_s`: the next image can be
    handed over, to be prepared meanwhile) or closed.
    """

    def __init__(self, unit: str, ahead_s: float, typical_patches: int) -> None:
        self.unit = unit
        self.ahead_s = ahead_s
        self.typical_patches = typical_patches
        self.by_load = False                # open lanes: least loaded first, instead of first done first
        self.lanes: dict[str, EncoderReplica] = {}
        # Of the lanes that take work: cost in flight, how many, and typical images a second.
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

    def set_lane(self, name: str, kind: str, model: TimeModel, taking: bool, now: float) -> EncoderReplica:
        """Add a lane, or give it another time model or another will to work."""
        lane = self.lanes.get(name)
        if lane is None or lane.kind != kind and not lane.held:
            if lane is not None:
                self.drop_lane(name)
            lane = self.lanes[name] = EncoderReplica(name, kind, model, self._numbers)
            self._numbers += 1
        elif lane.model is model and lane.taking is taking:
            return lane
        self._forget(lane)
        lane.model, lane.taking = model, taking
        self._turns = None
        self._place(lane, now)
        return lane

    def drop_lane(self, name: str) -> None:
        """A lane that is no more; it must hold nothing."""
        lane = self.lanes.pop(name)
        assert not lane.held, "a lane that is gone still holds jobs"
        self._forget(lane)
        self._turns = None

    def take(self, lane: EncoderReplica, job: Job, now: float) -> None:
        """`job` is handed to `lane`."""
        self._forget(lane)
        lane.take(job, job.cost(self.unit), now)
        self._place(lane, now)

    def let_go(self, lane: EncoderReplica, job: Job, now: float) -> None:
        """`lane` is done with `job`, one way or the other."""
        self._forget(lane)
        lane.let_go(job, job.cost(self.unit), now)
        self._place(lane, now)

    def rebuild(self, now: float, unit: str | None = None) -> None:
        """Sort all lanes anew: after a change of unit, order or typical size."""
        lanes = list(self.lanes.values())
        for lane in lanes:
            self._forget(lane)
        self.unit = unit or self.unit
        for lane in lanes:
            lane.in_flight = sum(job.cost(self.unit) for job in lane.held)
            self._place(lane, now)

    def _forget(self, lane: EncoderReplica) -> None:
        for entries, entry in lane.places:
            del entries[bisect_left(entries, entry)]
        if lane.places:
            self.count[lane.kind] -= 1
            left = self.in_flight[lane.kind] - lane.in_flight
            self.in_flight[lane.kind] = left if left > DRIFT else 0.0
            self.rate[lane.kind] = self.rate[lane.kind] - 1.0 / lane.seconds if self.count[lane.kind] else 0.0
        lane.places = []

    def _place(self, lane: EncoderReplica, now: float) -> None:
        if not lane.taking:
            return
        self._count_in(lane)
        if not lane.held:
            self._insert(lane, self._idle[lane.kind], lane.seconds)
        elif lane.until - self.ahead_s <= now and not lane.alone:
            self._insert(lane, self._open[lane.kind], lane.in_flight if self.by_load else lane.until + lane.seconds)
        else:
            self._insert(lane, self._closed, lane.seconds)
            if not lane.alone:
                self._insert(lane, self._opening, lane.until - self.ahead_s)

    def _count_in(self, lane: EncoderReplica) -> None:
        self.count[lane.kind] += 1
        self.in_flight[lane.kind] += lane.in_flight
        lane.seconds = max(lane.model.predict(self.typical_patches), SECONDS_MIN)
        self.rate[lane.kind] += 1.0 / lane.seconds

    def _insert(self, lane: EncoderReplica, entries: list[ReplicaEntry], key: float) -> None:
        entry = (key, lane.number, lane)
        insort(entries, entry)
        lane.places.append((entries, entry))

    # --- what the policies look at

    def advance(self, now: float) -> None:
        """Open the lanes whose time has come."""
        while self._opening and self._opening[0][0] <= now:
            lane = self._opening[0][2]
            self._forget(lane)
            self._place(lane, now)

    def opens_at(self) -> float | None:
        """When the next closed lane opens."""
        return self._opening[0][0] if self._opening else None

    def idle(self, kind: str, but: str | None = None) -> EncoderReplica | None:
        """The fastest that holds nothing; the one of that name only if there is no other."""
        lanes = self._idle[kind]
        return next((lane for _, _, lane in lanes if lane.name != but), lanes[0][2] if lanes else None)

    def open(self, kind: str, now: float) -> EncoderReplica | None:
        """The best of those that are nearly done."""
        entries = self._open[kind]
        while entries:
            lane = entries[0][2]
            if lane.remaining(now) <= self.ahead_s:
                return lane
            # Late, and likely to be later: it gets nothing more until it is done with something.
            self._forget(lane)
            self._count_in(lane)
            self._insert(lane, self._closed, lane.seconds)
        return None

    def first(self, kind: str, now: float) -> EncoderReplica | None:
        """The best that can take a job: the fastest idle one, else the best of the open ones."""
        return self.idle(kind) or self.open(kind, now)

    def candidates(self, now: float) -> list[EncoderReplica]:
        """The best of each kind and state: one of them is the first to finish a job, whatever its size."""
        found = (self.idle(GPU), self.open(GPU, now), self.idle(CPU), self.open(CPU, now))
        return [lane for lane in found if lane is not None]

    @property
    def any_open(self) -> bool:
        return any(self._idle.values()) or any(self._open.values())

    def is_open(self, lane: EncoderReplica, now: float) -> bool:
        return lane.taking and not lane.alone and lane.remaining(now) <= self.ahead_s

    def faster(self, seconds: float) -> tuple[list[EncoderReplica], int]:
        """Closed lanes that need less than `seconds` for an image of typical size, and how many there are.

        Of many only some, evenly spread: they stand for all, and a decision stays cheap.
        """
        count = bisect_left(self._closed, (seconds,))
        step = -(-count // SAMPLE_MAX) or 1
        return [lane for _, _, lane in self._closed[:count:step]], count

    def turns(self) -> list[EncoderReplica]:
        """Encoders that take work, as the fleet lists them."""
        if self._turns is None:
            self._turns = [lane for lane in self.lanes.values() if lane.taking]
        return self._turns
