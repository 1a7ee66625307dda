"""Keeps each worker where a plan made now would put it, and bound there.

Notices that CPUs or memory nodes came or went (a cgroup's cpuset, a CPU switched off) and that something else
moved a worker's threads.  What goes where is the plan's word, that workers move is the supervisor's work.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count

from epdd.errors import StartupError
from epdd.fleet.supervisor import Supervisor
from epdd.fleet.worker import Worker
from epdd.hardware import binding
from epdd.hardware.topology import ranges
from epdd.wire import WorkerSpec

log = logging.getLogger(__name__)

LOOK_S = 5.0                # between two looks; one costs a system call a thread
CHANGES_MAX = 20            # shown by status


class PlacementWatcher:
    """`plan` reads the machine and plans anew; it runs in a thread and may raise StartupError."""

    def __init__(self, supervisor: Supervisor, plan: Callable[[], list[WorkerSpec]]) -> None:
        self._supervisor = supervisor
        self._plan = plan
        self._allowed = _allowed()          # what the plan in force was made for
        self._planning = asyncio.Lock()
        self.error = ""                     # why there is no plan for what is there now
        self.changes: list[str] = []        # the last ones, for people

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:
                log.exception("the look at the workers' seats failed")      # a bug of ours: the next look may do better

    async def look(self, plan_anew: bool = False) -> None:
        """Act on what has changed; `plan_anew` also where nothing seems to have."""
        async with self._planning:
            allowed = _allowed()
            if not allowed[1]:      # /proc cannot be read: out of descriptors, say
                allowed = allowed[0], self._allowed[1]
            if allowed != self._allowed:
                log.warning("epdd may use CPUs %s, memory of NUMA nodes %s; it was CPUs %s, NUMA nodes %s",
                            *map(ranges, (*allowed, *self._allowed)))
            if plan_anew or allowed != self._allowed:
                self._allowed = allowed
                await self._reseat()
        for worker in list(self._supervisor.workers):
            self._hold(worker)

    async def _reseat(self) -> None:
        try:
            specs = await asyncio.get_running_loop().run_in_executor(None, self._plan)
        except StartupError as error:
            self.error = error.message
            log.error("the workers stay where they are: %s", error.message)
            return
        self.error = ""
        changes = self._supervisor.reconcile(keep_names([worker.spec for worker in self._supervisor.workers], specs))
        for change in changes:
            log.warning("%s", change)
        self.changes = [*self.changes, *changes][-CHANGES_MAX:]

    def _hold(self, worker: Worker) -> None:
        """Put back threads that something else moved: the kernel too, whenever a cpuset changes.

        Compared with what could be bound at the start, so that a binding that is denied is not tried for ever.
        """
        if worker.process is None or worker.ready is None or worker.restarting or worker.spec.emulated is not None:
            return      # what is emulated is bound to nothing
        pid, bound = worker.process.pid, set(worker.ready.binding.cpus)
        strays = [tid for tid, cpus in binding.threads(pid).items() if not cpus <= bound or tid == pid and cpus < bound]
        if strays:
            log.warning("%s binding lost threads=%s, bound again to CPUs %s", worker.name, len(strays), ranges(bound))
        for tid in strays:
            try:
                os.sched_setaffinity(tid, bound)
            except OSError as error:
                log.warning("%s thread=%s not bound again: %s", worker.name, tid, error.strerror)
        process = binding.folder(pid)
        readable, nodes = binding.policy(process)[0] != "", binding.memory_nodes(process)
        if readable and nodes != worker.ready.binding.mem_nodes:
            # A memory policy can be set from inside only, and pages lie where they were first touched.
            log.warning("%s memory binding lost nodes=%s, it starts again", worker.name, ranges(nodes) or "any")
            self._supervisor.restart(worker.name)


def keep_names(now: Iterable[WorkerSpec], wanted: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """`wanted`, each that sits where one sits now under that one's name: so it is not taken for moved."""
    names: dict[tuple[object, ...], list[str]] = {}
    for spec in now:
        names.setdefault((spec.role, *spec.seat), []).append(spec.name)
    kept, others = [], []
    for spec in wanted:
        same = names.get((spec.role, *spec.seat))
        if same:
            kept.append(replace(spec, name=same.pop(0)))
        else:
            others.append(spec)
    taken = {spec.name for spec in kept}
    for spec in others:
        name = next(name for i in count() if (name := f"{spec.role}/{i}") not in taken)
        taken.add(name)
        kept.append(replace(spec, name=name))
    return kept


def _allowed() -> tuple[frozenset[int], frozenset[int]]:
    """CPUs and memory nodes that this process may use."""
    return frozenset(os.sched_getaffinity(0)), frozenset(binding.allowed_nodes())
