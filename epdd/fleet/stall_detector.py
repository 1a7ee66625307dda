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

from epdd.fleet.process import ForkServer, effort
from epdd.fleet.worker import State, Worker
from epdd.settings.workers import FleetSettings

log = logging.getLogger(__name__)

WATCH_S = 1.0               # how often silence is looked at
HELD_S = 10.0               # after a kill: a process that is not gone then is held by the kernel, for a device perhaps
SLOW_FACTOR = 20.0          # a step that computes may take so many times what it should,
SLOW_MIN_S = 60.0           # and at least this: it swaps, or shares its CPUs with much else


class StallDetector:
    """Looks at the supervisor's workers; that a killed one comes back is the supervisor's matter."""

    def __init__(self, workers: Sequence[Worker], config: FleetSettings, fork_server: Callable[[], ForkServer],
                 give_up: Callable[[Worker], None]) -> None:
        """`give_up` is told of a worker that was killed and is still there."""
        self._workers = workers
        self._config = config
        self._fork_server = fork_server
        self._give_up = give_up
        # What suspects had done by the last look, by pid, and since when that has not changed.
        self._before: dict[int, tuple[tuple[int, int] | None, float]] = {}
        self._now = dict(self._before)

    async def run(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            if now - looked > 2 * WATCH_S:
                self._excuse(now - looked, now)
            looked = now
            self._before, self._now = self._now, {}
            for worker in self._workers:
                if worker.process is not None and worker.process.killed_at is not None:
                    if now - worker.process.killed_at > HELD_S:
                        self._give_up(worker)
                elif worker.state is State.STARTING:
                    self._watch_start(worker, now)
                else:
                    self._watch_silence(worker, now)

    def _still_s(self, pid: int, now: float) -> float:
        """For how long it has been seen to do nothing at all."""
        done = effort(pid)
        before = self._before.get(pid)
        since = before[1] if before is not None and done is not None and done == before[0] else now
        self._now[pid] = done, since
        return now - since

    def _watch_start(self, worker: Worker, now: float) -> None:
        seconds = now - worker.began
        late = seconds > self._config.start_timeout_s
        if worker.process is not None:
            if late:
                worker.fault = f"not ready after {seconds:.0f} s"
                log.error("%s not ready seconds=%.0f, killing it", worker.name, seconds)
                worker.process.kill()
            return
        # It never forked: only another fork server can.
        pid = self._fork_server().pid
        if late or pid is not None and self._still_s(pid, now) > self._config.stall_s:
            log.error("fork server pid=%s does not answer, replacing it", pid)
            self._fork_server().stop()

    def _watch_silence(self, worker: Worker, now: float) -> None:
        silent = _silence_s(worker, now)
        if silent < self._config.stall_s / 2:
            return
        assert worker.process is not None and worker.channel is not None
        still = self._still_s(worker.process.pid, now) >= self._config.stall_s / 3
        # Who waits for a GPU uses no CPU either.
        if silent > (self._config.stall_s + worker.channel.expected_s if still else self._slow_s(worker)):
            how = "standing still" if still else "computing"
            worker.fault = f"silent for {silent:.0f} s, {how}"
            log.error("%s silent seconds=%.0f %s, killing it", worker.name, silent, how)
            worker.process.kill()

    def _slow_s(self, worker: Worker) -> float:
        """The longest silence of one that computes."""
        expected = worker.channel.expected_s if worker.channel is not None else 0.0
        return self._config.stall_s + max(SLOW_MIN_S, SLOW_FACTOR * expected)

    def _excuse(self, seconds: float, now: float) -> None:
        """The daemon itself stood still (a frozen container, a stopped process): it could hear nobody meanwhile."""
        log.warning("epdd stood still seconds=%.1f", seconds)
        self._now.clear()
        for worker in self._workers:
            worker.began = min(now, worker.began + seconds)
            if worker.channel is not None:
                worker.channel.last_heard = min(now, worker.channel.last_heard + seconds)

    @property
    def progressing(self) -> bool:
        """False while a worker is silent for longer than any may be: then the watchdog is not fed."""
        now = time.monotonic()
        return all(_silence_s(worker, now) <= self._slow_s(worker) for worker in self._workers)


def _silence_s(worker: Worker, now: float) -> float:
    """How long nothing has come from a living worker that was ready."""
    if worker.process is None or worker.channel is None or worker.state not in (State.READY, State.DRAINING):
        return 0.0
    return now - worker.channel.last_heard
