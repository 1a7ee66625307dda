"""One schedule of epdd's dispatch, from the first request to the last process gone, and what must hold in it.

Supervisor, pipeline, encoding, router, leases and channels are the real ones; processes, sockets, memory and time are
those of explore_fleet.py and explore_loop.py.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

from explore_fleet import Channel, Link, Manners, Memory, Process, Violation
from explore_loop import Action, AtRandom, Choices, Loop

from epdd.arena import PAGE
from epdd.config import POLICIES, Config
from epdd.dispatch.admission import Admission
from epdd.dispatch.encoding import Encoding
from epdd.dispatch.history import History
from epdd.dispatch.leases import Leases
from epdd.dispatch.pipeline import Pipeline
from epdd.dispatch.request import Image, Placed, Request
from epdd.errors import ArenaFull, MediaError, NoWorker, ProtocolError, Rejected, WorkerLost, WorkerTimeout
from epdd.families.family import CLIP_MEAN, CLIP_STD, Family
from epdd.fleet import supervisor
from epdd.fleet.worker import Worker
from epdd.wire import Done, Prefilled, Sampling, Tokens, WorkerSpec

ACTIONS_MAX = 5_000         # of a schedule: ten times what the longest needs
NEVER_S = 1e9
ROWS_A_PAGE = 16
FAMILY = Family("qwen3_vl", "/nowhere", 1, 2, 3, 16, 2, 2, 3136, 1 << 20, CLIP_MEAN, CLIP_STD,
                hidden=PAGE // ROWS_A_PAGE // 4, planes=1, context_max=4096, vocab=1000, eos_ids=(0,))
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
    leaves_after: int = 0           # events, by closing the answer; 0: stays
    slow: bool = False              # reads an event when the schedule says so


@dataclass(frozen=True)
class Scenario:
    """Fleet, arena and requests; what happens to them is the schedule's."""

    asks: tuple[Ask, ...]
    encoders: int = 1
    gpus: int = 0                   # of the encoders
    pds: int = 1
    pages: int = 8
    cache_pages: int = 8
    cancels: int = 0                # at most so many of each
    deaths: int = 0
    orders: int = 0                 # drain, resume, restart, garbage, the stop of the daemon
    policy: str = "earliest"
    encode_s: float = 0.05
    # To run all schedules of it: things happen one after another, each when the loop has nothing left to do; processes
    # take works at once and are heard at once, time passes when nothing else can happen, and all are ready before the
    # first request.  Orders and answers still cross: a Cancel is taken when the schedule says so.
    small: bool = False


def scenario(rng: random.Random) -> Scenario:
    """Any, small enough that requests get into each other's way."""
    pool = [0, 1, 2, 3] + [image for image in (MANNERS.bad, MANNERS.lie, MANNERS.deadly) if rng.random() < 0.1]
    asks = tuple(Ask(tuple(rng.choice(pool) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))),
                     n=rng.choice((1, 1, 1, 2)), max_tokens=rng.randint(1, 2), deadly=rng.random() < 0.03,
                     deadline_s=rng.choice((0.0, 0.0, 0.0, 0.3, 2.0)), leaves_after=rng.choice((0, 0, 0, 1, 2)),
                     slow=rng.random() < 0.2) for _ in range(rng.randint(2, 5)))
    encoders = rng.randint(1, 3)
    pages = rng.randint(2, 7)
    return Scenario(asks, encoders, rng.randint(0, encoders), rng.randint(1, 2), pages, rng.randint(0, pages),
                    rng.choice((0, 1, 3)), rng.choice((0, 0, 1, 2, 4)), rng.choice((0, 0, 1, 3)),
                    rng.choice(list(POLICIES)), rng.choice((0.05, 1.0)))


def pages_of(image: int) -> int:
    """Odd images are large."""
    return 1 + image % 2


@dataclass
class Asker:
    """A client: what it asked, what it was told, how that ended."""

    ask: Ask
    request: Request
    told: list[tuple[int, Any]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    outcome: str = ""               # completed, left, cancelled or failed
    error: Exception | None = None
    gate: asyncio.Future[None] | None = None

    async def run(self, admission: Admission, pipeline: Pipeline) -> None:
        """As the front end does it."""
        try:
            with admission.enter():
                await self._listen(pipeline)
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            raise
        except Exception as error:
            self.outcome, self.error = "failed", error

    async def _listen(self, pipeline: Pipeline) -> None:
        async with aclosing(pipeline.run(self.request)) as events:
            async for event in events:
                if not isinstance(event[1], (Prefilled, Tokens, Done)):
                    self.told.clear()       # all begins anew
                    continue
                self.told.append(event)
                if self.ask.slow:
                    self.gate = asyncio.get_running_loop().create_future()
                    await self.gate
                if len(self.told) == self.ask.leaves_after:
                    self.outcome = "left"
                    return
        self.outcome = "completed"

    def read_on(self) -> None:
        assert self.gate is not None
        self.gate.set_result(None)


class House:
    """Everything of one schedule."""

    def __init__(self, given: Scenario, choices: Choices, loop: Loop) -> None:
        self._given = given
        self._choices = choices
        self._loop = loop
        self._left = {"cancel": given.cancels, "death": given.deaths, "order": given.orders}
        self._happened: Counter[str] = Counter()    # faults
        self.story: list[str] = []
        self.faults: list[str] = []         # of ours, as the log and the loop tell them
        self.memory = Memory(given.pages * PAGE)
        self.leases = Leases(given.pages * PAGE, given.cache_pages * PAGE)
        self.leases._extents = self.memory
        config = _settings(given.policy)
        devices = ["cuda:0" if i < given.gpus else "cpu" for i in range(given.encoders)]
        specs = [*(WorkerSpec(f"encoder/{i}", "encoder", device, (), None, 1, "") for i, device in enumerate(devices)),
                 *(WorkerSpec(f"pd/{i}", "pd", "cpu", (), None, 1, "") for i in range(given.pds))]
        self.supervisor = supervisor.Supervisor(specs, -1, config.fleet, cast(Any, self), self._changed)
        self.admission = Admission(1000, self.supervisor, self.leases, FAMILY)
        history = History(loop.time)
        self.encoding = Encoding(self.supervisor, self.leases, config, FAMILY, history)
        self.pipeline = Pipeline(self.supervisor, self.leases, self.encoding, self.admission, history)
        self.processes: list[Process] = []
        self.askers = [Asker(ask, _request(f"r{i}", ask)) for i, ask in enumerate(given.asks)]
        self._goes_on = False       # without a fault, an operator or time
        self._stop: asyncio.Task[None] | None = None

    def _changed(self, worker: Worker) -> None:
        self.pipeline.fleet_changed()

    # --- as the supervisor's fork server

    pid = None

    async def spawn(self, spec: WorkerSpec, link: Any, arena_fd: int) -> Process:
        manners = Manners(encode_s=self._given.encode_s)
        process = Process(spec, link.other, self.memory, manners, self._died)
        self.processes = [each for each in self.processes if each.alive or each.outbox or not each.seen] + [process]
        return process

    def stop(self) -> None:
        """There is no fork server to end."""

    def _died(self) -> None:
        self._happened["death"] += 1

    # --- as the loop's world

    def happen(self, timeout: float | None) -> float:
        if self.faults:
            raise Violation(self.faults[0])
        if self._ended():
            self._loop.stop()
            return 0.0
        if timeout == 0 and (self._given.small or not self._choices.now_and_then()):
            return 0.0
        if len(self.story) > ACTIONS_MAX:
            raise Violation("it goes on for ever")
        if self._given.small and self._hurry():
            return 0.0
        actions = self._actions()
        if timeout and not (self._given.small and self._goes_on) and not self._ending:
            actions.append(Action("time passes", lambda: None))
        if timeout == 0:
            actions.append(Action("", lambda: None))        # or nothing, while callbacks run
        if not actions:
            return self._nothing_left(timeout)
        action = actions[0] if self._given.small and self._aside else self._choices.choose(actions)
        if action.name:
            self.story.append(action.name)
        action.call(*action.args)
        return timeout or 0.0 if action.name == "time passes" else 0.0

    def _hurry(self) -> bool:
        """What processes do at once in a small scenario; whether the daemon has something to hear of it."""
        for process in self.processes:
            process.take_works()
        return any([process.be_heard() for process in self.processes])

    @property
    def _aside(self) -> bool:
        """Before the first request, or after the last."""
        return self._stop is not None or not all(worker.was_ready for worker in self.supervisor.workers)

    @property
    def _ending(self) -> bool:
        """What is told to end at a stop does so sooner than the daemon gives up waiting."""
        return self._stop is not None and any(process.told_to_end for process in self.processes)

    def _nothing_left(self, timeout: float | None) -> float:
        if timeout is None:
            raise Violation(f"nothing can happen any more, and {self._waiting()} wait")
        return timeout

    def _waiting(self) -> str:
        return ", ".join(asker.request.id for asker in self.askers if not asker.outcome) or "processes"

    def _ended(self) -> bool:
        """Every request has ended, and no process has anything to do or say."""
        if self._stop is not None:
            return self._stop.done() and all(asker.outcome or asker.task is None for asker in self.askers)
        return all(asker.outcome for asker in self.askers) and not any(
            process.outbox or process.works or process.inbox or not process.alive and not process.seen
            for process in self.processes) and not any(worker.in_flight for worker in self.supervisor.workers)

    def _actions(self) -> list[Action]:
        actions: list[Action] = []
        for process in self.processes:
            actions += process.actions()
        for asker in self.askers:
            if asker.task is None and not any(worker.was_ready for worker in self.supervisor.role("pd")):
                break       # all would be refused
            if asker.task is None:
                actions.append(Action(f"{asker.request.id} comes", self._begin, (asker,)))
                break       # in their order: they differ by what they ask
            if asker.gate is not None and not asker.gate.done():
                actions.append(Action(f"{asker.request.id} reads", asker.read_on))
        self._goes_on = bool(actions)
        if self._choices.now_and_then() and not (self._given.small and self._aside):
            actions += self._faults()
        if not self._goes_on:
            actions += self._repairs()
        return actions

    def _begin(self, asker: Asker) -> None:
        if asker.ask.deadline_s:
            object.__setattr__(asker.request, "deadline", self._loop.time() + asker.ask.deadline_s)
        asker.task = self._loop.create_task(asker.run(self.admission, self.pipeline))

    def _faults(self) -> Iterator[Action]:
        if self._left["cancel"]:
            for asker in self.askers:
                if asker.task is not None and not asker.outcome:
                    yield self._fault("cancel", f"{asker.request.id} is cancelled", asker.task.cancel)
        living = [process for process in self.processes if process.alive]
        if self._left["death"]:
            for process in living:
                yield self._fault("death", f"{process.spec.name} dies", process.die, -9)
        if self._left["order"] and self._stop is None:
            for worker in self.supervisor.workers:
                for verb in (self.supervisor.drain, self.supervisor.resume, self.supervisor.restart):
                    yield self._fault("order", f"{verb.__name__} {worker.name}", verb, worker.name)
            for process in living:
                yield self._fault("order", f"{process.spec.name} breaks the wire format", process.garble)
            yield self._fault("order", "the daemon is told to stop", self._begin_stop)

    def _fault(self, kind: str, name: str, call: Callable[..., Any], *args: Any) -> Action:
        def happen() -> None:
            self._left[kind] -= 1
            self._happened[kind] += 1
            call(*args)
        return Action(name, happen)

    def _begin_stop(self) -> None:
        self._happened["order"] += len(self.supervisor.workers)     # of all of them at once
        self._stop = self._loop.create_task(self.supervisor.stop())

    def _repairs(self) -> Iterator[Action]:
        """When nothing goes on: an operator takes back what was drained, once."""
        for worker in self.supervisor.workers:
            if worker.drained and not self.supervisor.stopping:
                yield Action(f"resume {worker.name}", self.supervisor.resume, (worker.name,))
                return

    # --- the schedule, and what must hold in it

    def run(self) -> None:
        """Raises Violation."""
        self._loop.set_exception_handler(lambda loop, context: self.faults.append(str(context)))
        self._loop.live_in(cast(Any, self))
        self._loop.call_soon(self.supervisor.start)
        self._loop.run_forever()
        for asker in self.askers:
            self._check_outcome(asker)
        if self._stop is None:
            self._check_rest()
            self._begin_stop()
            self._loop.run_forever()
        if left := [task.get_name() for task in asyncio.all_tasks(self._loop) if not task.done()]:
            raise Violation(f"tasks are left: {left}")
        if any(process.alive for process in self.processes):
            raise Violation("a process outlives the stop")
        self._check_rest()

    def _check_rest(self) -> None:
        """Every gauge is back at its start, and every work has ended once."""
        if wrong := {work: ends for work, ends in Channel.ends.items() if ends != 1}:
            raise Violation(f"works that did not end once: {wrong}")
        leases, router = self.leases, self.encoding.router
        rest = {"in the house": self.admission.inside, "bytes in use": leases.used_bytes - leases.cached_bytes,
                "waiting for room": leases.waiting,
                "wanted": sum(entry.refs for entry in leases._entries.values()),
                "held": sum(entry.holds for entry in leases._entries.values()),
                "queue": len(router.queue), "queue's cost": router.waiting, "jobs": len(self.encoding._jobs),
                "in lanes": sum(len(lane.held) for lane in router.pools.lanes.values()),
                "in flight": sum(router.pools.in_flight.values()),
                "in the suspects' turn": int(self.pipeline._suspects.locked())}
        if left := {name: value for name, value in rest.items() if value}:
            raise Violation(f"left at rest: {left}")
        if leases.cached_bytes > leases.cache_limit:
            raise Violation("the cache is over its limit")

    def _check_outcome(self, asker: Asker) -> None:
        ask, error = asker.ask, asker.error
        by_choice: dict[int, list[Any]] = {}
        for index, event in asker.told:
            by_choice.setdefault(index, []).append(event)
        for events in by_choice.values():
            # A second attempt may begin where the first had told of its prefill only.
            while len(events) > 1 and isinstance(events[0], Prefilled) and isinstance(events[1], Prefilled):
                events.pop(0)
            answer = [len(ask.images), *ask.images]
            if not isinstance(events[0], Prefilled) or any(
                    list(event.ids) != answer for event in events if isinstance(event, Tokens)):
                raise Violation(f"{asker.request.id} was told {events}, not of {answer}")
        if asker.outcome == "completed":
            whole = [[type(event) for event in events] for events in by_choice.values()]
            if whole != [[Prefilled, *[Tokens] * ask.max_tokens, Done]] * ask.n:
                raise Violation(f"{asker.request.id} completed with {whole}")
            if {MANNERS.bad, MANNERS.lie} & set(ask.images):
                raise Violation(f"{asker.request.id} has an image that cannot be encoded, and completed")
        elif asker.outcome == "cancelled" and not self._happened["cancel"]:
            raise Violation(f"{asker.request.id} was cancelled by nobody")
        elif error is not None and not self._fair(asker, error):
            raise Violation(f"{asker.request.id} failed for no reason: {type(error).__name__}: {error}")

    def _fair(self, asker: Asker, error: Exception) -> bool:
        """Whether what happened explains the error."""
        ask, started = asker.ask, any(isinstance(event, Tokens) for _, event in asker.told)
        orders = self._happened["order"]
        losses = orders + self._happened["death"]       # at most
        if isinstance(error, MediaError):
            return MANNERS.bad in ask.images
        if isinstance(error, ProtocolError):
            return MANNERS.lie in ask.images
        if isinstance(error, WorkerTimeout):
            return ask.deadline_s > 0
        if isinstance(error, ArenaFull):
            return sum(pages_of(image) for image in set(ask.images)) > self._given.pages
        if isinstance(error, WorkerLost) and started:
            return losses > 0
        if isinstance(error, (WorkerLost, Rejected)):
            return losses > 1       # one loss before the first token is made good
        return isinstance(error, NoWorker) and (orders > 0 or losses > 1)


@functools.cache
def _settings(policy: str) -> Config:
    """Nobody is silent for too long: a process that takes its time is one that has not been chosen yet."""
    config = Config().with_values("fleet", {"stall_s": NEVER_S, "start_timeout_s": NEVER_S}, "explored")
    return config.with_values("router", {"policy": policy}, "explored")


def _request(name: str, ask: Ask) -> Request:
    images = [Image(bytes((image,)), 32, 32, (1, 8, 8 * pages_of(image)), ROWS_A_PAGE * pages_of(image), str(image))
              for image in ask.images]
    spans = [Placed(1 + i, i) for i in range(len(images))]
    return Request(name, [DEADLY if ask.deadly else 7], Sampling(ask.max_tokens), images, spans, ask.n, arrived=0.0)


class _Faults(logging.Handler):
    """Takes what the daemon logs of its own bugs: there it goes on, here that is a violation."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextmanager
def explored() -> Iterator[None]:
    """Inside, the supervisor starts explored processes, and epdd's log is still."""
    root = logging.getLogger("epdd")
    before = root.level, root.propagate, root.handlers[:]
    root.handlers[:], root.propagate = [], False
    root.setLevel(logging.ERROR)
    try:
        with mock.patch.object(supervisor, "Channel", Channel), mock.patch.object(supervisor, "socket_pair", Link.pair):
            yield
    finally:
        root.level, root.propagate, root.handlers[:] = before


def run(given: Scenario, choices: Choices) -> list[str]:
    """Run one schedule inside `explored()`; what happened, in order.  Raises Violation, with that in its notes."""
    loop = Loop()
    handler: _Faults | None = None
    root = logging.getLogger("epdd")
    try:
        with mock.patch("time.monotonic", loop.time):
            asyncio.set_event_loop(loop)
            Channel.ends = {}
            house = House(given, choices, loop)
            handler = _Faults(house.faults)
            root.addHandler(handler)
            try:
                house.run()
            except Exception as error:
                error.add_note(f"{given}\n" + "\n".join(house.story))
                loop.give_up()
                raise
            return house.story
    finally:
        if handler is not None:
            root.removeHandler(handler)
        asyncio.set_event_loop(None)
        loop.close()


def run_seed(seed: int) -> list[str]:
    """The schedule of a seed."""
    rng = random.Random(seed)
    given = scenario(rng)
    return run(given, AtRandom(rng, rng.choice((0.05, 0.2))))
