"""Scenarios of explored schedules: a small fleet, a small arena, and requests that compete for them."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tools.explore.fleet import Manners
from tools.explore.memory import Violation

from epdd.arena import PAGE
from epdd.dispatch.admission import Admission
from epdd.dispatch.pipeline import Pipeline, Restarted
from epdd.dispatch.request import Image, Placed, Request
from epdd.dispatch.request_record import RequestRecord
from epdd.families.model_info import ModelInfo
from epdd.families.processor import CLIP_MEAN, CLIP_STD
from epdd.settings.workers import POLICIES
from epdd.wire import Sampling, Tokens

ROWS_A_PAGE = 16
FAMILY = ModelInfo("qwen3_vl", "/nowhere", 1, (2, 1, 3), 16, 2, 2, 3136, 1 << 20, CLIP_MEAN, CLIP_STD,
                   hidden=PAGE // ROWS_A_PAGE // 4, planes=1, max_model_len=4096, vocab=1000, eos_ids=(0,))
MANNERS = Manners()
DEADLY = MANNERS.deadly


@dataclass(frozen=True)
class Ask:
    """One request of a scenario."""

    images: tuple[int, ...] = ()
    n: int = 1
    max_tokens: int = 1
    deadly: bool = False
    deadline_s: float = 0.0
    leaves_after: int = 0           # events after which it closes the answer; 0: never
    slow: bool = False              # reads each event when the schedule says so
    whole: bool = False             # not streamed: starts again if its worker dies


@dataclass(frozen=True)
class Scenario:
    """Fleet, arena and requests; the schedule decides what happens."""

    asks: tuple[Ask, ...]
    encoders: int = 1
    gpus: int = 0                   # of the encoders
    pds: int = 1
    pages: int = 8
    cache_pages: int = 8
    cancels: int = 0                # at most this many of each
    deaths: int = 0
    orders: int = 0                 # drain, resume, restart, another placement, garbage, the stop of the daemon
    lacks: int = 0                  # times that other requests need the room of images kept for a retry
    policy: str = "earliest"
    encode_s: float = 0.05
    # Reduced so that all schedules can be run: an action happens only when the loop is idle; processes take works and
    # deliver frames at once; time passes if nothing else can happen; all are ready before the first request.  Requests
    # and answers still cross: a Cancel is taken when the schedule says so.
    small: bool = False


def scenario(rng: random.Random) -> Scenario:
    """A random one, small enough that requests compete."""
    pool = [0, 1, 2, 3] + [image for image in (MANNERS.bad, MANNERS.lie, MANNERS.deadly) if rng.random() < 0.1]
    asks = tuple(Ask(tuple(rng.choice(pool) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))),
                     n=rng.choice((1, 1, 1, 2)), max_tokens=rng.randint(1, 2), deadly=rng.random() < 0.03,
                     deadline_s=rng.choice((0.0, 0.0, 0.0, 0.3, 2.0)), leaves_after=rng.choice((0, 0, 0, 1, 2)),
                     slow=rng.random() < 0.2, whole=rng.random() < 0.5) for _ in range(rng.randint(2, 5)))
    encoders = rng.randint(1, 3)
    pages = rng.randint(2, 7)
    return Scenario(asks, encoders, rng.randint(0, encoders), rng.randint(1, 2), pages, rng.randint(0, pages),
                    rng.choice((0, 1, 3)), rng.choice((0, 0, 1, 2, 4)), rng.choice((0, 0, 1, 3)),
                    rng.choice((0, 0, 1, 2)), rng.choice(list(POLICIES)), rng.choice((0.05, 1.0)))


def pages_of(image: int) -> int:
    """Odd images are large."""
    return 1 + image % 2


def request(name: str, ask: Ask) -> Request:
    """As the frontend would make it."""
    images = [Image(bytes((image,)), 32, 32, (1, 8, 8 * pages_of(image)), ROWS_A_PAGE * pages_of(image), str(image))
              for image in ask.images]
    spans = [Placed(1 + i, i) for i in range(len(images))]
    return Request(RequestRecord(name), [DEADLY if ask.deadly else 7], Sampling(ask.max_tokens), images, spans, ask.n,
                   whole=ask.whole)


@dataclass
class Asker:
    """A client: its request, its events and its outcome."""

    ask: Ask
    request: Request
    told: list[tuple[int, Any]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    outcome: str = ""               # completed, left, cancelled or failed
    error: Exception | None = None
    gate: asyncio.Future[None] | None = None
    begun: bool = False             # got a token
    anew: int = 0                   # how often the answer started again
    offered: bool = False           # its images may be released if others need the room

    async def run(self, admission: Admission, pipeline: Pipeline) -> None:
        """As the frontend does it."""
        try:
            with admission.admit():
                await self._listen(pipeline)
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            raise
        except Exception as error:
            self.outcome, self.error = "failed", error

    async def _listen(self, pipeline: Pipeline) -> None:
        async with aclosing(pipeline.run(self.request)) as events:
            async for event in events:
                if isinstance(event[1], Restarted):
                    self._begin_anew()
                    continue
                self.told.append(event)
                if isinstance(event[1], Tokens):
                    self._images_read()
                if self.ask.slow:
                    self.gate = asyncio.get_running_loop().create_future()
                    await self.gate
                if len(self.told) == self.ask.leaves_after:
                    self.outcome = "left"
                    return
        self.outcome = "completed"

    def _images_read(self) -> None:
        """At the first token a stream releases its images; a non-streamed answer only offers them."""
        self.begun = True
        if self.ask.whole:
            self.offered = True
        else:
            self.free_images()

    def free_images(self) -> None:
        self.offered = False
        self.request.images.clear()

    def _begin_anew(self) -> None:
        if not (self.ask.whole and self.begun and self.request.has_images):
            raise Violation(f"{self.request.id} begins anew after {self.told}, whole={self.ask.whole}")
        self.told.clear()
        self.begun = self.offered = False
        self.anew += 1

    def read_on(self) -> None:
        assert self.gate is not None
        self.gate.set_result(None)
