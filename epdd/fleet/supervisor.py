"""Keeps every wanted worker alive: spawn, restart with backoff, drain, move to another placement, stop.

One task a worker.  Only this file fails the work of a process, after its exit.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from epdd.errors import NotFound, ProtocolError, StartupError, WorkerLost
from epdd.fleet import exits
from epdd.fleet.channel import Channel, Report
from epdd.fleet.process import STOP_TIMEOUT_S, ForkServer, Process
from epdd.fleet.stall_detector import StallDetector
from epdd.fleet.worker import State, Worker
from epdd.hardware.topology import ranges
from epdd.settings.workers import FleetSettings
from epdd.wire import Failed, Heartbeat, Loading, Opened, WorkerSpec, socket_pair

log = logging.getLogger(__name__)


class Supervisor:
    """Owns the workers.  `on_change` is called after every change of a worker's state."""

    def __init__(self, specs: Iterable[WorkerSpec], arena_fd: int, config: FleetSettings, fork_server: ForkServer,
                 on_change: Callable[[Worker], None]) -> None:
        self.workers = [Worker(spec) for spec in specs]
        self._arena_fd = arena_fd
        self._config = config
        self._fork_server = fork_server
        self._on_change = on_change
        self._oom_kills = exits.OomKills()
        self.stall_detector = StallDetector(self.workers, config, lambda: self._fork_server, self._abandon)
        self.stopping = False               # workers that exit are not started again
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all workers; returns at once."""
        for worker in self.workers:
            self._launch(worker)
        self._tasks.append(asyncio.create_task(self.stall_detector.run(), name="watch"))

    def role(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == role]

    def find(self, name: str) -> Worker:
        """Raises NotFound."""
        for worker in self.workers:
            if worker.name == name:
                return worker
        raise NotFound(f"no worker {name!r}; there are {', '.join(w.name for w in self.workers)}")

    def drain(self, name: str) -> None:
        """Let a worker finish what it has and give it nothing new."""
        worker = self.find(name)
        if worker.state in (State.READY, State.GONE):
            worker.drained = True
        if worker.state is State.READY:
            self._set(worker, State.DRAINING)
        else:
            self._notify(worker)    # so that no request waits for it

    def resume(self, name: str) -> None:
        """Undo `drain`; a FAILED worker is started again."""
        worker = self.find(name)
        worker.drained = False
        if worker.state is State.DRAINING:
            self._set(worker, State.READY)
        elif worker.state is State.FAILED and worker.process is None and not self.stopping:
            # The state changes at once: a second `resume` must not start a second process.
            self._set(worker, State.STARTING)
            self._launch(worker)
        worker.retry_now.set()

    def restart(self, name: str) -> None:
        """End the process now and start another; its requests are retried."""
        worker = self.find(name)
        if worker.process is not None:
            worker.restarting = True
            if worker.state is State.READY:
                self._set(worker, State.DRAINING)       # new work would be lost
            worker.process.terminate()
        elif worker.state is State.FAILED:
            self.resume(name)
        worker.retry_now.set()

    def reconcile(self, specs: Iterable[WorkerSpec]) -> list[str]:
        """Make the fleet match `specs`; returns the changes as text.  Equal placements are left alone."""
        wanted, changes = {spec.name: spec for spec in specs}, []
        for name, spec in wanted.items():
            worker = next((worker for worker in self.workers if worker.name == name), None)
            if worker is None:
                worker = Worker(spec)
                self.workers.append(worker)
                self._launch(worker)
                changes.append(f"{name} starts on {_place(spec)}")
                continue
            before, worker.spec = worker.spec, spec
            if before.placement != spec.placement or not worker.wanted:
                worker.wanted = True
                changes.append(f"{name} moves from {_place(before)} to {_place(spec)}")
                self.restart(name)
        for worker in [worker for worker in self.workers if worker.wanted and worker.name not in wanted]:
            worker.wanted = False
            changes.append(f"{worker.name} stops, there is no place for it")
            if worker.state is State.FAILED and worker.process is None:
                self.workers.remove(worker)
            else:
                self.restart(worker.name)
        self.workers.sort(key=lambda worker: (worker.role, len(worker.name), worker.name))
        return changes

    async def stop(self) -> None:
        """End all workers and wait until they are gone."""
        self.stopping = True
        processes = [worker.process for worker in self.workers if worker.process]
        for worker in self.workers:
            if worker.channel is not None:
                worker.channel.close()
        for process in processes:
            process.terminate()
        # Tasks without a process wait for a backoff, the fork server or the next check.
        living = {worker.name for worker in self.workers if worker.process is not None}
        for task in self._tasks:
            if task.get_name() not in living:
                task.cancel()
        for worker in self.workers:
            if worker.process is None and worker.state is not State.FAILED:
                worker.state = State.GONE
            self._notify(worker)    # so that no request waits for it
        if not living:
            self._fork_server.stop()        # its imports may take seconds more
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S)
            for process in processes:
                process.kill()
            await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S)
        self._fork_server.stop()

    async def _supervise(self, worker: Worker) -> None:
        """Run one process after another until the daemon stops or the worker is given up."""
        failures = in_vain = 0      # deaths in a row before `fleet.min_uptime_s`; those of them without any work done
        while not self.stopping and worker.wanted:
            done = worker.done
            exit_code = await self._run_once(worker)
            if self.stopping:
                break
            well = worker.restarting or worker.was_ready_for(self._config.min_uptime_s)
            failures = 0 if well else failures + 1
            # Images that crash a worker must not make it given up: it also serves other clients.
            in_vain = 0 if well or worker.done > done else in_vain + 1
            log.log(logging.INFO if worker.restarting else logging.ERROR, "%s lost pid=%s %s%s", worker.name,
                    worker.process and worker.process.pid, "" if worker.ready else "before ready: ", worker.last_error)
            worker.process = worker.channel = worker.ready = None
            # A worker that was ready before may only lack memory for the moment.
            hopeless = exit_code == StartupError.exit_code and not worker.was_ready
            lost = "" if worker.restarting else await exits.gpu_lost(worker.spec)
            if not worker.restarting and (lost or hopeless or in_vain >= self._config.max_failures):
                if lost:
                    worker.last_error = f"{lost}: {worker.last_error}"
                elif not hopeless:
                    worker.last_error = f"died {in_vain} times in a row, the last time: {worker.last_error}"
                log.error("%s given up: %s", worker.name, worker.last_error)
                self._set(worker, State.FAILED)
                return
            # Immediately after `fleet.min_uptime_s` of service, else after `fleet.backoff_s`, doubled each time.
            if failures:
                worker.retry_now.clear()
                backoff_s = min(self._config.backoff_s * 2 ** (failures - 1), self._config.max_backoff_s)
                with suppress(TimeoutError):        # `resume` and `restart` end the wait
                    await asyncio.wait_for(worker.retry_now.wait(), backoff_s)
            worker.restarts += 1
        worker.process = worker.channel = worker.ready = None
        if not worker.wanted:
            self.workers.remove(worker)
        worker.state = State.GONE
        self._notify(worker)    # once more: at its exit, `wanted` or `stopping` may not have been set

    def _launch(self, worker: Worker) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(self._supervise(worker), name=worker.name))

    async def _run_once(self, worker: Worker) -> int:
        """One process from spawn to exit; returns its exit code with all its work failed."""
        worker.loading = Loading("forking", 0.0)
        worker.heartbeat = Heartbeat(0)
        worker.arenas = {}
        worker.restarting = False
        worker.began = time.monotonic()
        worker.fault = ""
        self._set(worker, State.STARTING)
        placement = worker.spec.placement
        try:
            process, ours = await self._spawn(worker)
        except (OSError, EOFError) as error:
            worker.last_error = f"cannot fork: {error}"
            self._set(worker, State.GONE)
            return 1
        worker.process, worker.channel = process, Channel(ours)
        if self.stopping or not worker.wanted or worker.spec.placement != placement:     # decided while it forked
            worker.restarting = True
            process.terminate()
        return await self._serve(worker, process, worker.channel)

    async def _spawn(self, worker: Worker) -> tuple[Process, socket.socket]:
        """A process and our end of its socket.  Raises OSError, EOFError (the fork server died)."""
        ours, theirs = socket_pair()
        with theirs:
            try:
                ours.setblocking(False)
                return await self._fork_server.spawn(worker.spec, theirs, self._arena_fd), ours
            except BaseException:
                ours.close()
                raise

    async def _serve(self, worker: Worker, process: Process, channel: Channel) -> int:
        oom_kills = self._oom_kills.watch(process.pid)
        reading = asyncio.create_task(channel.read(lambda message: self._on_message(worker, message)))
        exiting = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({reading, exiting}, return_when=asyncio.FIRST_COMPLETED)
            if not exiting.done():
                # The worker closed its socket or broke the protocol: it cannot be used any more.
                if isinstance(error := reading.exception(), ProtocolError):
                    worker.fault = error.message
                elif error is not None:
                    log.error("%s reading failed", worker.name, exc_info=error)
                await asyncio.wait({exiting}, timeout=1.0)
                process.kill()
            code = await exiting
            # Its last messages still count: read the socket to its end.
            await asyncio.wait({reading}, timeout=1.0)
        finally:
            reading.cancel()
            channel.close()
        how = exits.describe(code, self._oom_kills.killed_one(oom_kills))
        if code != 0 or not worker.fault:
            worker.last_error = f"{how}{': ' if worker.fault else ''}{worker.fault}"
        else:
            worker.last_error = worker.fault
        worker.fault = ""
        self._set(worker, State.GONE)
        worker.failed += len(channel.works)
        channel.fail(WorkerLost(f"{worker.name} was lost ({how})",
                                crashed=not worker.restarting and not self.stopping))
        return code

    def _abandon(self, worker: Worker) -> None:
        """Fail the work of a killed process that has not exited; `_run_once` still waits for its exit."""
        if worker.state is not State.FAILED and worker.channel is not None:
            pid = worker.process and worker.process.pid
            worker.last_error = f"pid {pid} was killed and does not exit: {worker.fault}"
            log.error("%s %s", worker.name, worker.last_error)
            self._set(worker, State.FAILED)
            worker.channel.give_up(WorkerLost(f"{worker.name} was lost (killed)", crashed=True))

    def _on_message(self, worker: Worker, message: Report) -> None:
        if isinstance(message, Heartbeat):
            worker.heartbeat = message
        elif isinstance(message, Opened):
            worker.on_opened(message)
            self._notify(worker)
        elif isinstance(message, Loading):
            worker.on_loading(message)
            self._notify(worker)
        elif isinstance(message, Failed):
            worker.fault = message.message
        elif not self.stopping:
            worker.on_ready(message)
            for warning in filter(None, (message.binding.warning, message.warning)):
                log.warning("%s: %s", worker.name, warning)
            log.info("%s ready seconds=%.1f pid=%s cpus=%s dtype=%s", worker.name, message.seconds,
                     worker.process and worker.process.pid, message.binding.cpus, message.dtype)
            self._set(worker, State.DRAINING if worker.drained else State.READY)

    def _set(self, worker: Worker, state: State) -> None:
        if worker.state is not state:
            worker.state = state
            self._notify(worker)

    def _notify(self, worker: Worker) -> None:
        try:
            self._on_change(worker)
        except Exception:
            # A bug in the listener must not end this worker's task.
            log.exception("%s handling its change of state failed", worker.name)


def _place(spec: WorkerSpec) -> str:
    where = "" if spec.numa_node is None else f" of NUMA node {spec.numa_node}"
    return f"CPUs {ranges(spec.cpus)}{where}" if spec.cpus else f"any CPUs{where}"
