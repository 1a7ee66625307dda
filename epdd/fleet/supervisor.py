"""Keeps every wanted worker alive: spawn, restart with backoff, drain, move to another seat, stop.

One task a worker.  Work lost with a process is failed here, after its exit, and nowhere else.
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
from epdd.fleet.process import KILLED_BY_US_S, ForkServer, Process
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
        self.silence = StallDetector(self.workers, config, lambda: self._fork_server, self._held)
        self.stopping = False               # nothing comes back any more
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to bring all workers up; returns at once."""
        for worker in self.workers:
            self._begin(worker)
        self._tasks.append(asyncio.create_task(self.silence.run(), name="watch"))

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
            self._tell(worker)      # who waits for it to come back waits for nothing

    def resume(self, name: str) -> None:
        """Undo `drain`; a FAILED worker is tried again from nothing."""
        worker = self.find(name)
        worker.drained = False
        if worker.state is State.DRAINING:
            self._set(worker, State.READY)
        elif worker.state is State.FAILED and worker.process is None and not self.stopping:
            # Not FAILED from here on, or a second resume would put a second process beside it.
            self._set(worker, State.STARTING)
            self._begin(worker)
        worker.hurry.set()

    def restart(self, name: str) -> None:
        """End the process now; the supervisor brings a new one up, work in flight is placed again."""
        worker = self.find(name)
        if worker.process is not None:
            worker.restarting = True
            if worker.state is State.READY:
                self._set(worker, State.DRAINING)       # what it would be given now would be lost
            worker.process.terminate()
        elif worker.state is State.FAILED:
            self.resume(name)
        worker.hurry.set()

    def reconcile(self, specs: Iterable[WorkerSpec]) -> list[str]:
        """Make `specs` the wanted fleet: a worker whose seat is the same is left alone.  Returns what changes."""
        wanted, changes = {spec.name: spec for spec in specs}, []
        for name, spec in wanted.items():
            worker = next((worker for worker in self.workers if worker.name == name), None)
            if worker is None:
                worker = Worker(spec)
                self.workers.append(worker)
                self._begin(worker)
                changes.append(f"{name} starts on {_place(spec)}")
                continue
            before, worker.spec = worker.spec, spec
            if before.seat != spec.seat or not worker.wanted:
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
        # What waits for a backoff, the fork server or the next look has no process to wait for.
        living = {worker.name for worker in self.workers if worker.process is not None}
        for task in self._tasks:
            if task.get_name() not in living:
                task.cancel()
        for worker in self.workers:
            if worker.process is None and worker.state is not State.FAILED:
                worker.state = State.GONE
            self._tell(worker)      # who waits for one to come back learns that none will
        if not living:
            self._fork_server.stop()        # it may be in the middle of its imports
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=KILLED_BY_US_S)
            for process in processes:
                process.kill()
            await asyncio.wait(self._tasks, timeout=KILLED_BY_US_S)
        self._fork_server.stop()

    async def _keep(self, worker: Worker) -> None:
        """Bring `worker` up again and again until the daemon stops or the worker is given up."""
        failures = in_vain = 0      # deaths in a row, none of them after a time of being well; without any work done
        while not self.stopping and worker.wanted:
            done = worker.done
            exit_code = await self._live_once(worker)
            if self.stopping:
                break
            well = worker.restarting or worker.was_well(self._config.min_uptime_s)
            failures = 0 if well else failures + 1
            # Clients whose images kill it must not be able to have a worker given up that serves the others.
            in_vain = 0 if well or worker.done > done else in_vain + 1
            log.log(logging.INFO if worker.restarting else logging.ERROR, "%s lost pid=%s %s%s", worker.name,
                    worker.process and worker.process.pid, "" if worker.ready else "before ready: ", worker.last_error)
            worker.process = worker.channel = worker.ready = None
            # A worker that had been well once may only lack memory for the moment: that can pass.
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
            # A worker that had been well comes back at once; one that dies again and again waits ever longer.
            if failures:
                worker.hurry.clear()
                with suppress(TimeoutError):        # unless an operator has mended what was wrong
                    await asyncio.wait_for(worker.hurry.wait(), min(self._config.backoff_s * 2 ** (failures - 1),
                                                                    self._config.max_backoff_s))
            worker.restarts += 1
        worker.process = worker.channel = worker.ready = None
        if not worker.wanted:
            self.workers.remove(worker)
        worker.state = State.GONE
        self._tell(worker)      # told of its end already, a listener did not know yet that it will not come back

    def _begin(self, worker: Worker) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(self._keep(worker), name=worker.name))

    async def _live_once(self, worker: Worker) -> int:
        """One process from spawn to exit; returns its exit code with all its work failed."""
        worker.loading = Loading("forking", 0.0)
        worker.beat = Heartbeat(0)
        worker.arenas = {}
        worker.restarting = False
        worker.began = time.monotonic()
        worker.fault = ""
        self._set(worker, State.STARTING)
        seat = worker.spec.seat
        try:
            process, ours = await self._spawn(worker)
        except (OSError, EOFError) as error:
            worker.last_error = f"cannot fork: {error}"
            self._set(worker, State.GONE)
            return 1
        worker.process, worker.channel = process, Channel(ours)
        if self.stopping or not worker.wanted or worker.spec.seat != seat:     # decided while it forked
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
        reading = asyncio.create_task(channel.read(lambda message: self._heard(worker, message)))
        exiting = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({reading, exiting}, return_when=asyncio.FIRST_COMPLETED)
            if not exiting.done():
                # The worker hung up or broke the protocol: nothing more can be trusted to come.
                if isinstance(error := reading.exception(), ProtocolError):
                    worker.fault = error.message
                elif error is not None:
                    log.error("%s reading failed", worker.name, exc_info=error)
                await asyncio.wait({exiting}, timeout=1.0)
                process.kill()
            code = await exiting
            # What it said before it died still counts: drain the socket to its end.
            await asyncio.wait({reading}, timeout=1.0)
        finally:
            reading.cancel()
            channel.close()
        how = exits.describe(code, self._oom_kills.took(oom_kills))
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

    def _held(self, worker: Worker) -> None:
        """The kernel does not let a killed process go; when it does, all goes on as after any death."""
        if worker.state is not State.FAILED and worker.channel is not None:
            pid = worker.process and worker.process.pid
            worker.last_error = f"pid {pid} was killed and does not go: {worker.fault}"
            log.error("%s %s", worker.name, worker.last_error)
            self._set(worker, State.FAILED)
            worker.channel.give_up(WorkerLost(f"{worker.name} was lost (killed)", crashed=True))

    def _heard(self, worker: Worker, message: Report) -> None:
        if isinstance(message, Heartbeat):
            worker.beat = message
        elif isinstance(message, Opened):
            worker.opened(message)
            self._tell(worker)
        elif isinstance(message, Loading):
            worker.loads(message)
            self._tell(worker)
        elif isinstance(message, Failed):
            worker.fault = message.message
        elif not self.stopping:
            worker.is_ready(message)
            for warning in filter(None, (message.binding.warning, message.warning)):
                log.warning("%s: %s", worker.name, warning)
            log.info("%s ready seconds=%.1f pid=%s cpus=%s dtype=%s", worker.name, message.seconds,
                     worker.process and worker.process.pid, message.binding.cpus, message.dtype)
            self._set(worker, State.DRAINING if worker.drained else State.READY)

    def _set(self, worker: Worker, state: State) -> None:
        if worker.state is not state:
            worker.state = state
            self._tell(worker)

    def _tell(self, worker: Worker) -> None:
        try:
            self._on_change(worker)
        except Exception:
            # A fault of who listens (a terminal that is gone, say) must not cost the worker or its keeper.
            log.exception("%s change was not taken", worker.name)


def _place(spec: WorkerSpec) -> str:
    where = "" if spec.numa_node is None else f" of NUMA node {spec.numa_node}"
    return f"CPUs {ranges(spec.cpus)}{where}" if spec.cpus else f"any CPUs{where}"
