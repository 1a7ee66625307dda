"""Keeps each worker where a plan made now would put it, and bound there.

Plans anew when CPUs or memory nodes come or go (a cgroup's cpuset, a CPU switched off), and binds threads again that
something else moved.  `placement` decides where workers run, the supervisor moves them.
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

CHECK_INTERVAL_S = 5.0      # a check costs one system call a thread
CHANGES_MAX = 20            # that `epdctl status` shows


class PlacementWatcher:
    """`plan` reads the machine and plans anew; it runs in a thread and may raise StartupError."""

    def __init__(self, supervisor: Supervisor, plan: Callable[[], list[WorkerSpec]]) -> None:
        self._supervisor = supervisor
        self._plan = plan
        self._allowed = _allowed()          # CPUs and nodes of the plan in force
        self._planning = asyncio.Lock()
        self.error = ""                     # why planning failed; empty: it did not
        self.changes: list[str] = []        # the last CHANGES_MAX, as text

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await self.check()
            except Exception:       # a bug of ours; the next check may succeed
                log.exception("checking the workers' placement failed")

    async def check(self, plan_anew: bool = False) -> None:
        """Plan if CPUs or memory nodes have changed, or if `plan_anew`; then bind threads that were moved."""
        async with self._planning:
            allowed = _allowed()
            if not allowed[1]:      # /proc cannot be read, for example for lack of file descriptors
                allowed = allowed[0], self._allowed[1]
            if allowed != self._allowed:
                log.warning("epdd may use CPUs %s, memory of NUMA nodes %s; it was CPUs %s, NUMA nodes %s",
                            *map(ranges, (*allowed, *self._allowed)))
            if plan_anew or allowed != self._allowed:
                self._allowed = allowed
                await self._replan()
        for worker in list(self._supervisor.workers):
            self._rebind(worker)

    async def _replan(self) -> None:
        try:
            specs = await asyncio.get_running_loop().run_in_executor(None, self._plan)
        except StartupError as error:
            self.error = error.message
            log.error("workers stay where they are, no new plan: %s", error.message)
            return
        self.error = ""
        changes = self._supervisor.reconcile(keep_names([worker.spec for worker in self._supervisor.workers], specs))
        for change in changes:
            log.warning("%s", change)
        self.changes = [*self.changes, *changes][-CHANGES_MAX:]

    def _rebind(self, worker: Worker) -> None:
        """Bind threads again that something else moved; the kernel moves them when a cpuset changes.

        Compares with the CPUs that could be bound at the start: a binding that was denied then is not tried again.
        """
        if worker.process is None or worker.ready is None or worker.restarting or worker.spec.emulated is not None:
            return      # an emulated worker is bound to nothing
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
            # Only the process itself can set its memory policy, and its pages stay where they were first touched.
            log.warning("%s memory binding lost nodes=%s, restarting it", worker.name, ranges(nodes) or "any")
            self._supervisor.restart(worker.name)


def keep_names(now: Iterable[WorkerSpec], wanted: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """`wanted`, renamed so that a worker with the placement of a present one has its name and is left alone."""
    names: dict[tuple[object, ...], list[str]] = {}
    for spec in now:
        names.setdefault((spec.role, *spec.placement), []).append(spec.name)
    kept, others = [], []
    for spec in wanted:
        same = names.get((spec.role, *spec.placement))
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
