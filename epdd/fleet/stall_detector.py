"""Kills workers that miss their heartbeat, or take too long to start.

A worker sends a heartbeat between its steps, so it is silent for one step at most.  A worker that is silent longer is
checked in /proc.  If it makes no progress, it counts as hung and is killed after `fleet.stall_s` and its step's
expected time.  If it computes, it may only be slow, and has SLOW_FACTOR times its step's expected time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from epdd.fleet.process import ForkServer, progress_counters
from epdd.fleet.worker import State, Worker
from epdd.settings.workers import FleetSettings

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
KILL_TIMEOUT_S = 10.0       # a killed process that exists after this is blocked in the kernel, by a driver perhaps
SLOW_FACTOR = 20.0          # a step that computes may take this many times its expected time,
SLOW_MIN_S = 60.0           # and at least this: the worker may swap, or share its CPUs


class StallDetector:
    """Checks the supervisor's workers and kills those that hang; the supervisor starts them again."""

    def __init__(self, workers: Sequence[Worker], config: FleetSettings, fork_server: Callable[[], ForkServer],
                 give_up: Callable[[Worker], None]) -> None:
        """`give_up` is called with a worker whose process was killed and has not exited."""
        self._workers = workers
        self._config = config
        self._fork_server = fork_server
        self._give_up = give_up
        # Progress counters of silent processes by pid, and since when they are the same; of the last check, of this one
        self._before: dict[int, tuple[tuple[int, int] | None, float]] = {}
        self._now = dict(self._before)

    async def run(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            now = time.monotonic()
            if now - looked > 2 * CHECK_INTERVAL_S:
                self._allow_for_pause(now - looked, now)
            looked = now
            self._before, self._now = self._now, {}
            for worker in self._workers:
                if worker.process is not None and worker.process.killed_at is not None:
                    if now - worker.process.killed_at > KILL_TIMEOUT_S:
                        self._give_up(worker)
                elif worker.state is State.STARTING:
                    self._check_start(worker, now)
                else:
                    self._check_silence(worker, now)

    def _idle_s(self, pid: int, now: float) -> float:
        """For how long the process has made no progress."""
        counters = progress_counters(pid)
        before = self._before.get(pid)
        since = before[1] if before is not None and counters is not None and counters == before[0] else now
        self._now[pid] = counters, since
        return now - since

    def _check_start(self, worker: Worker, now: float) -> None:
        seconds = now - worker.began
        late = seconds > self._config.start_timeout_s
        if worker.process is not None:
            if late:
                worker.fault = f"not ready after {seconds:.0f} s"
                log.error("%s not ready seconds=%.0f, killing it", worker.name, seconds)
                worker.process.kill()
            return
        # There is no process yet: the fork server does not answer, and another one has to fork.
        pid = self._fork_server().pid
        if late or pid is not None and self._idle_s(pid, now) > self._config.stall_s:
            log.error("fork server pid=%s does not answer, replacing it", pid)
            self._fork_server().stop()

    def _check_silence(self, worker: Worker, now: float) -> None:
        silent = _silence_s(worker, now)
        if silent < self._config.stall_s / 2:
            return
        assert worker.process is not None and worker.channel is not None
        still = self._idle_s(worker.process.pid, now) >= self._config.stall_s / 3
        # A worker that waits for its GPU uses no CPU time either, so its step's expected time is added.
        if silent > (self._config.stall_s + worker.channel.expected_s if still else self._slow_limit_s(worker)):
            how = "standing still" if still else "computing"
            worker.fault = f"silent for {silent:.0f} s, {how}"
            log.error("%s silent seconds=%.0f %s, killing it", worker.name, silent, how)
            worker.process.kill()

    def _slow_limit_s(self, worker: Worker) -> float:
        """How long a worker that computes may be silent."""
        expected = worker.channel.expected_s if worker.channel is not None else 0.0
        return self._config.stall_s + max(SLOW_MIN_S, SLOW_FACTOR * expected)

    def _allow_for_pause(self, seconds: float, now: float) -> None:
        """The daemon itself was stopped (a frozen container, SIGSTOP): move the workers' deadlines by as much."""
        log.warning("epdd was stopped or blocked seconds=%.1f", seconds)
        self._now.clear()
        for worker in self._workers:
            worker.began = min(now, worker.began + seconds)
            if worker.channel is not None:
                worker.channel.last_heard = min(now, worker.channel.last_heard + seconds)

    @property
    def progressing(self) -> bool:
        """False while a worker is silent for longer than its limit: the daemon does not feed its watchdog then."""
        now = time.monotonic()
        return all(_silence_s(worker, now) <= self._slow_limit_s(worker) for worker in self._workers)


def _silence_s(worker: Worker, now: float) -> float:
    """Seconds since the last message of a worker that is ready; 0 for others."""
    if worker.process is None or worker.channel is None or worker.state not in (State.READY, State.DRAINING):
        return 0.0
    return now - worker.channel.last_heard
