"""Kills workers that are silent, or starting for too long: alive is not the same as working."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from epdd.config import Fleet
from epdd.fleet.worker import State, Worker

log = logging.getLogger(__name__)

WATCH_S = 1.0               # how often silence is looked at


class SilenceWatch:
    """Looks at the supervisor's workers; that a killed one comes back is the supervisor's matter."""

    def __init__(self, workers: Sequence[Worker], config: Fleet, replace_fork_server: Callable[[], None]) -> None:
        self._workers = workers
        self._config = config
        self._replace_fork_server = replace_fork_server

    async def run(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            if now - looked > 2 * WATCH_S:
                self._excuse(now - looked, now)
            looked = now
            for worker in self._workers:
                if worker.state is State.STARTING:
                    self._watch_start(worker, now - worker.began)
                elif worker.process and worker.channel and worker.silence_s(now) > self._config.stall_s:
                    silent = now - worker.channel.last_heard
                    worker.fault = f"silent for {silent:.0f} s"
                    log.error("%s silent seconds=%.0f, killing it", worker.name, silent)
                    worker.process.kill()

    def _watch_start(self, worker: Worker, seconds: float) -> None:
        if seconds <= self._config.start_timeout_s:
            return
        worker.fault = f"not ready after {seconds:.0f} s"
        log.error("%s not ready seconds=%.0f, killing it", worker.name, seconds)
        if worker.process is not None:
            worker.process.kill()
        else:
            self._replace_fork_server()     # it never forked: only another can

    def _excuse(self, seconds: float, now: float) -> None:
        """The daemon itself stood still (a frozen container, a stopped process): it could hear nobody meanwhile."""
        log.warning("epdd stood still seconds=%.1f", seconds)
        for worker in self._workers:
            worker.began = min(now, worker.began + seconds)
            if worker.channel is not None:
                worker.channel.last_heard = min(now, worker.channel.last_heard + seconds)

    @property
    def progressing(self) -> bool:
        """False while a worker is silent beyond its excuse: then the watchdog is not fed."""
        now = time.monotonic()
        return all(worker.silence_s(now) <= self._config.stall_s for worker in self._workers)
