"""One schedule of epdd's dispatch, from the first request to the last process gone.

Supervisor, pipeline, encoding, router, leases and channels are real; processes, sockets, memory and time are those of
`fleet.py`, `memory.py` and `loop.py`; `rules.py` checks the outcome.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest import mock

from tools.explore import rules
from tools.explore.fleet import Channel, Link, Manners, Process
from tools.explore.loop import Action, AtRandom, Choices, Loop
from tools.explore.memory import Memory, Violation
from tools.explore.scenario import FAMILY, Asker, Scenario, request, scenario

from epdd.arena import PAGE
from epdd.dispatch.admission import Admission
from epdd.dispatch.encoder_cache.cache import EncoderCache
from epdd.dispatch.encoding import Encoding
from epdd.dispatch.history import History
from epdd.dispatch.pipeline import Pipeline
from epdd.fleet import supervisor
from epdd.fleet.worker import Worker
from epdd.settings.config import Config
from epdd.wire import WorkerSpec

ACTIONS_MAX = 5_000         # of a schedule: ten times what the longest needs
TOLD_MAX = 300              # last actions that a violation prints
NEVER_S = 1e9


class ExploredDaemon:
    """The daemon, clients and world of one schedule."""

    def __init__(self, given: Scenario, choices: Choices, loop: Loop) -> None:
        self._given = given
        self._choices = choices
        self._loop = loop
        self._left = {"cancel": given.cancels, "death": given.deaths, "order": given.orders, "lack": given.lacks}
        self.happened: Counter[str] = Counter()    # faults
        self.story: list[str] = []
        self.faults: list[str] = []         # the daemon's own bugs, from the log and the loop
        self.memory = Memory(given.pages * PAGE)
        self.cache = EncoderCache(given.pages * PAGE, given.cache_pages * PAGE)
        self.cache.host.extents = self.memory
        config = _settings(given.policy)
        devices = ["cuda:0" if i < given.gpus else "cpu" for i in range(given.encoders)]
        specs = [*(WorkerSpec(f"encoder/{i}", "encoder", device, (), None, 1, "") for i, device in enumerate(devices)),
                 *(WorkerSpec(f"pd/{i}", "pd", "cpu", (), None, 1, "") for i in range(given.pds))]
        self.supervisor = supervisor.Supervisor(specs, -1, config.fleet, cast(Any, self), self._changed)
        self.admission = Admission(1000, self.supervisor, self.cache, FAMILY)
        self.encoding = Encoding(self.supervisor, self.cache, config, FAMILY)
        self.pipeline = Pipeline(self.supervisor, self.cache, self.encoding, self.admission, History())
        self.processes: list[Process] = []
        self.askers = [Asker(ask, request(f"r{i}", ask)) for i, ask in enumerate(given.asks)]
        self._goes_on = False       # actions without a fault, an operator or time
        self._stop: asyncio.Task[None] | None = None

    def _changed(self, worker: Worker) -> None:
        self.pipeline.fleet_changed()

    # --- for the supervisor, as its fork server

    pid = None

    async def spawn(self, spec: WorkerSpec, link: Any, arena_fd: int) -> Process:
        manners = Manners(encode_s=self._given.encode_s)
        process = Process(spec, link.other, self.memory, manners, self._died)
        self.processes = [each for each in self.processes if each.alive or each.outbox or not each.seen] + [process]
        return process

    def stop(self) -> None:
        """No fork server to end."""

    def _died(self) -> None:
        self.happened["death"] += 1

    # --- for the loop, as its world

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
            actions.append(Action("", lambda: None))        # or none, while callbacks run
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
        """Whether it is before the first request or after the last."""
        return self._stop is not None or not all(worker.was_ready for worker in self.supervisor.workers)

    @property
    def _ending(self) -> bool:
        """At a stop, processes end before the daemon's time limit."""
        return self._stop is not None and any(process.told_to_end for process in self.processes)

    def _nothing_left(self, timeout: float | None) -> float:
        if timeout is None:
            raise Violation(f"nothing can happen any more, and {self._waiting()} wait")
        return timeout

    def _waiting(self) -> str:
        return ", ".join(asker.request.id for asker in self.askers if not asker.outcome) or "processes"

    def _ended(self) -> bool:
        """Whether every request has ended and no process has work or frames."""
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
                break       # all requests would be refused
            if asker.task is None:
                actions.append(Action(f"{asker.request.id} comes", self._begin, (asker,)))
                break       # in order: they differ
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
        if self._left["lack"]:
            for asker in self.askers:
                if asker.offered and not asker.outcome:
                    yield self._fault("lack", f"{asker.request.id}'s images are freed", asker.free_images)
        if self._left["order"] and self._stop is None:
            for worker in self.supervisor.workers:
                for verb in (self.supervisor.drain, self.supervisor.resume, self.supervisor.restart, self._move):
                    yield self._fault("order", f"{verb.__name__.strip('_')} {worker.name}", verb, worker.name)
            for process in living:
                yield self._fault("order", f"{process.spec.name} breaks the wire format", process.garble)
            yield self._fault("order", "the daemon is told to stop", self._begin_stop)

    def _fault(self, kind: str, name: str, call: Callable[..., Any], *args: Any) -> Action:
        def happen() -> None:
            self._left[kind] -= 1
            self.happened[kind] += 1
            call(*args)
        return Action(name, happen)

    def _move(self, name: str) -> None:
        """Another placement: the process ends, and its successor starts there."""
        specs = [worker.spec for worker in self.supervisor.workers]
        self.supervisor.reconcile(replace(spec, cpus=(*spec.cpus, len(spec.cpus)))
                                  if spec.name == name else spec for spec in specs)

    def _begin_stop(self) -> None:
        self.happened["order"] += len(self.supervisor.workers)     # of all of them at once
        self._stop = self._loop.create_task(self.supervisor.stop())

    def _repairs(self) -> Iterator[Action]:
        """If nothing can happen: an operator resumes drained workers, once."""
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
            rules.check_outcome(asker, self._given, self.happened)
        if self._stop is None:
            rules.check_rest(self)
            self._begin_stop()
            self._loop.run_forever()
        if left := [task.get_name() for task in asyncio.all_tasks(self._loop) if not task.done()]:
            raise Violation(f"tasks are left: {left}")
        if any(process.alive for process in self.processes):
            raise Violation("a process outlives the stop")
        rules.check_rest(self)


@functools.cache
def _settings(policy: str) -> Config:
    """Without stall limits: a silent process is one that the schedule has not chosen yet."""
    config = Config().with_values("fleet", {"stall_s": NEVER_S, "start_timeout_s": NEVER_S}, "explored")
    return config.with_values("router", {"policy": policy}, "explored")


class _Faults(logging.Handler):
    """Collects bugs that the daemon logs: it continues after them, but here they are violations."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextmanager
def explored() -> Iterator[None]:
    """Inside, the supervisor starts fake processes, and epdd's log is silent."""
    root = logging.getLogger("epdd")
    before = root.level, root.propagate, root.handlers[:]
    root.handlers[:], root.propagate = [], False
    root.setLevel(logging.ERROR)
    try:
        with (mock.patch.object(supervisor, "Channel", Channel),
              mock.patch.object(supervisor, "socket_pair", Link.pair),
              mock.patch("epdd.hardware.gpus.lost", lambda index: "")):
            yield
    finally:
        root.level, root.propagate, root.handlers[:] = before


def run(given: Scenario, choices: Choices) -> list[str]:
    """Run one schedule inside `explored()`; returns its actions in order.  Raises Violation, with them in its notes."""
    loop = Loop()
    handler: _Faults | None = None
    root = logging.getLogger("epdd")
    try:
        with mock.patch("time.monotonic", loop.time):
            asyncio.set_event_loop(loop)
            Channel.ends = {}
            daemon = ExploredDaemon(given, choices, loop)
            handler = _Faults(daemon.faults)
            root.addHandler(handler)
            try:
                daemon.run()
            except Exception as error:
                error.add_note(f"{given}\n" + "\n".join(daemon.story[:TOLD_MAX]))
                loop.give_up()
                raise
            return daemon.story
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
