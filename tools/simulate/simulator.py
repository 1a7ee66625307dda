"""Discrete events over the daemon's own queue, router and time models.

The daemon's own `Router` decides, and `epdd.emulated_time.Timeline` keeps the encoders' time as in emulated workers.
This module adds time, requests and deaths.  Not covered: text work, leases and the arena, prefill and decode, and the
cost of handing over.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from epdd.dispatch.crash_policy import ATTEMPTS_MAX
from epdd.dispatch.routing.queue import Job
from epdd.dispatch.routing.router import Router
from epdd.dispatch.routing.time_models import TimeModel
from epdd.emulated_time import EncoderGroup, Timeline

PATCHES_MAX = 65536         # largest image that time models are fitted to: 4096 x 4096 pixels


class Request(NamedTuple):
    """`images`: patches of each; none for text alone, which no encoder sees."""

    at: float               # seconds
    images: tuple[int, ...]


class Death(NamedTuple):
    """An encoder dies `at`, and is back after `away_s`."""

    at: float
    encoder: str
    away_s: float


class Encoder(NamedTuple):
    name: str
    group: EncoderGroup


@dataclass(frozen=True)
class Rule:
    """A way to route; `[router]` in the settings explains the fields of the same names.

    `ahead_s` of infinity is early binding: a job gets its encoder on arrival.  `whole` routes requests instead of
    images: all images of one go to the same encoder, as in the published router.  Both are baselines, which the daemon
    does not have.
    """

    name: str
    policy: str
    unit: str = "patch"
    ratio: float = 0.0
    slack: float = 1.0
    ahead_s: float = 0.25
    whole: bool = False


@dataclass(eq=False, kw_only=True)
class Work(Job):
    """A job with its images: one, or with a `whole` rule all of a request."""

    request: int
    parts: tuple[int, ...]
    attempts: int = 0


class Encoded(NamedTuple):
    """One job's outcome; times in seconds."""

    request: int
    images: int
    patches: int
    encoder: str
    queued: float
    started: float          # handed over
    ended: float


@dataclass
class Outcome:
    """One run.  `latencies` are of requests with images that lost none, in order."""

    rule: Rule
    latencies: list[float] = field(default_factory=list)
    encoded: list[Encoded] = field(default_factory=list)
    failed: list[Work] = field(default_factory=list)        # jobs that cost two encoders
    stuck: int = 0                                          # jobs that waited when no event was left
    ratios: list[tuple[float, float]] = field(default_factory=list)     # (when, R in force), at each end
    end: float = 0.0

    def percentile(self, share: float) -> float:
        return percentile(self.latencies, share)

    @property
    def mean(self) -> float:
        return sum(self.latencies) / len(self.latencies) if self.latencies else 0.0

    @property
    def oldest(self) -> float:
        """The greatest age of an image at its end."""
        return max((done.ended - done.queued for done in self.encoded), default=0.0)

    def images_by(self, names: Sequence[str]) -> int:
        """Number of images that these encoders encoded."""
        return sum(done.images for done in self.encoded if done.encoder in names)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def simulate(fleet: Sequence[Encoder], requests: Sequence[Request], rule: Rule, *, deaths: Sequence[Death] = (),
             seed: int = 0, watch: Callable[[float, Router], None] | None = None) -> Outcome:
    """Route `requests` over `fleet` until no event is left.  `watch` is called after each decision round."""
    return _Run(fleet, requests, rule, deaths, seed, watch).run()


class _Server:
    """One encoder: its pace, what it holds, and how often it was lost."""

    def __init__(self, encoder: Encoder, seed: int) -> None:
        self.encoder = encoder
        self.line = Timeline(encoder.group, f"{seed} {encoder.name}")
        self.held: deque[tuple[Work, float]] = deque()      # with the seconds it takes
        self.life = 0


class _Run:
    def __init__(self, fleet: Sequence[Encoder], requests: Sequence[Request], rule: Rule, deaths: Sequence[Death],
                 seed: int, watch: Callable[[float, Router], None] | None) -> None:
        self._rule, self._requests, self._watch = rule, requests, watch
        sizes = [patches for request in requests for patches in request.images]
        typical = max(1, round(sum(sizes) / len(sizes))) if sizes else 1024
        self.router = Router(rule.policy, rule.unit, rule.ratio, rule.slack, rule.ahead_s, typical)
        self._servers = {encoder.name: _Server(encoder, seed) for encoder in fleet}
        self._left = [len(request.images) for request in requests]
        self._done: dict[int, float] = {}
        self._outcome = Outcome(rule)
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        for server in self._servers.values():
            self._come(server, 0.0)
        for i, request in enumerate(requests):
            self._at(request.at, lambda now, i=i: self._arrive(i, now))  # type: ignore[misc]
        for death in deaths:
            self._at(death.at, lambda now, death=death: self._die(death, now))  # type: ignore[misc]

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action))

    def run(self) -> Outcome:
        now, router, events = 0.0, self.router, self._events
        # Each job in flight has an event at its end: without one, the waiting jobs would wait for ever.
        while events:
            wake = router.wake_at(now)
            if wake is not None and wake < events[0][0]:
                now = max(now, wake)
            else:
                now, _, action = heapq.heappop(events)
                action(now)
            self._assign(now)
            if self._watch is not None:
                self._watch(now, router)
        outcome = self._outcome
        outcome.stuck, outcome.end = len(router.queue), now
        outcome.latencies = [self._done[i] for i in sorted(self._done)]
        return outcome

    def _assign(self, now: float) -> None:
        while (choice := self.router.assign(now)) is not None:
            assert isinstance(choice.job, Work)
            self._begin(self._servers[choice.replica.name], choice.job, now)

    def _arrive(self, i: int, now: float) -> None:
        images = self._requests[i].images
        total = sum(images)
        for parts in ([images] if self._rule.whole else [(patches,) for patches in images]):
            if parts:
                shares = 1 if self._rule.whole else len(images)
                self.router.submit(Work(str(i), sum(parts), shares, total, request=i, parts=parts), now)
                if self._rule.ahead_s == math.inf:
                    self._assign(now)       # it has an encoder before the next one comes

    def _begin(self, server: _Server, work: Work, now: float) -> None:
        """The worker computes its jobs one after another."""
        work.attempts += 1
        services = [server.line.serve(now, server.encoder.group.image_seconds(patches)) for patches in work.parts]
        server.held.append((work, services[-1].end - services[0].start))
        life = server.life
        self._at(services[-1].end, lambda now: self._end(server, life, now))

    def _end(self, server: _Server, life: int, now: float) -> None:
        if life != server.life:
            return      # it died first
        work, seconds = server.held.popleft()
        self.router.replicas.by_name[server.encoder.name].model.observe(work.patches, seconds, now)
        self.router.ended(work, now)
        self._outcome.encoded.append(Encoded(work.request, len(work.parts), work.patches, server.encoder.name,
                                             work.queued, work.started, now))
        self._outcome.ratios.append((now, self.router.ratio()))
        self._left[work.request] -= len(work.parts)
        if not self._left[work.request]:
            self._done[work.request] = now - self._requests[work.request].at

    def _die(self, death: Death, now: float) -> None:
        server = self._servers[death.encoder]
        replica = self.router.replicas.by_name[death.encoder]
        if not replica.takes_work:
            return
        server.life += 1
        self.router.replicas.set_replica(replica.name, replica.kind, replica.model, False, now)
        lost = [work for work, _ in server.held]
        server.held.clear()
        for work in lost:
            self.router.ended(work, now)
            if work.attempts < ATTEMPTS_MAX:
                self.router.submit_again(work, exclusive=True)
            else:
                self._outcome.failed.append(work)
        self._at(now + death.away_s, lambda now: self._come(server, now))

    def _come(self, server: _Server, now: float) -> None:
        server.line.end = now
        model = TimeModel(server.encoder.group.samples(PATCHES_MAX))
        self.router.replicas.set_replica(server.encoder.name, server.encoder.group.kind, model, True, now)
