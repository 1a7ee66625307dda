"""Kills workers that are silent, or starting for too long: alive is not the same as working.

A worker beats between its steps, so it is silent for one step at most.  Of one that is silent longer the kernel
tells whether it still does something.  One that does nothing at all stands still and is replaced soon; one that
computes may only be slow, and gets a multiple of the time that its own measure promises.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from epdd.config import Fleet
from epdd.fleet.process import effort
from epdd.fleet.worker import State, Worker

log = logging.getLogger(__name__)

WATCH_S = 1.0               # how often silence is looked at
HELD_S = 10.0               # after a kill: a process that is not gone then is held by the kernel, for a device perhaps
SLOW_FACTOR = 20.0          # a step that computes may take so many times what it should,
SLOW_MIN_S = 60.0           # and at least this: it swaps, or shares its CPUs with much else


class SilenceWatch:
    """Looks at the supervisor's workers; that a killed one comes back is the supervisor's matter."""

    def __init__(self, workers: Sequence[Worker], config: Fleet, replace_fork_server: Callable[[], None],
                 give_up: Callable[[Worker], None]) -> None:
        """`give_up` is told of a worker that was killed and is still there."""
        self._workers = workers
        self._config = config
        self._give_up = give_up
        self._replace_fork_server = replace_fork_server
        self._still: dict[str, tuple[tuple[int, int], float]] = {}      # effort of the silent, unchanged since when

    async def run(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            if now - looked > 2 * WATCH_S:
                self._excuse(now - looked, now)
            looked = now
            for worker in self._workers:
                if worker.process is not None and now - (worker.process.killed_at or now) > HELD_S:
                    self._give_up(worker)
                elif worker.state is State.STARTING:
                    self._watch_start(worker, now - worker.began)
                else:
                    self._watch_silence(worker, now)

    def _watch_start(self, worker: Worker, seconds: float) -> None:
        if seconds <= self._config.start_timeout_s:
            return
        worker.fault = f"not ready after {seconds:.0f} s"
        log.error("%s not ready seconds=%.0f, killing it", worker.name, seconds)
        if worker.process is not None:
            worker.process.kill()
        else:
            self._replace_fork_server()     # it never forked: only another can

    def _watch_silence(self, worker: Worker, now: float) -> None:
        silent = _silence_s(worker, now)
        if silent < self._config.stall_s / 2:
            self._still.pop(worker.name, None)
            return
        assert worker.process is not None
        done = effort(worker.process.pid)
        if done is None:
            self._still.pop(worker.name, None)
        elif worker.name not in self._still or self._still[worker.name][0] != done:
            self._still[worker.name] = done, now
        if silent > self._limit_s(worker, now):
            how = "standing still" if worker.name in self._still else "computing"
            worker.fault = f"silent for {silent:.0f} s, {how}"
            log.error("%s silent seconds=%.0f %s, killing it", worker.name, silent, how)
            worker.process.kill()

    def _limit_s(self, worker: Worker, now: float) -> float:
        """Silence after which the worker counts as stuck."""
        assert worker.channel is not None
        expected = worker.channel.expected_s
        still = self._still.get(worker.name)
        if still is not None and now - still[1] >= self._config.stall_s / 3:
            return self._config.stall_s + expected      # who waits for a GPU uses no CPU either
        return self._config.stall_s + max(SLOW_MIN_S, SLOW_FACTOR * expected)

    def _excuse(self, seconds: float, now: float) -> None:
        """The daemon itself stood still (a frozen container, a stopped process): it could hear nobody meanwhile."""
        log.warning("epdd stood still seconds=%.1f", seconds)
        self._still.clear()
        for worker in self._workers:
            worker.began = min(now, worker.began + seconds)
            if worker.channel is not None:
                worker.channel.last_heard = min(now, worker.channel.last_heard + seconds)

    @property
    def progressing(self) -> bool:
        """False while a worker is silent beyond its limit: then the watchdog is not fed."""
        now = time.monotonic()
        return all(_silence_s(worker, now) <= self._limit_s(worker, now) for worker in self._workers
                   if worker.channel is not None)


def _silence_s(worker: Worker, now: float) -> float:
    """How long nothing has come from a living worker that was ready."""
    if worker.process is None or worker.channel is None or worker.state not in (State.READY, State.DRAINING):
        return 0.0
    return now - worker.channel.last_heard
