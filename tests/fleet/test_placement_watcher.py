"""The machine changes under a running fleet: some workers move, some stay, some are bound again."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from multiprocess import forkserver, resource_tracker

from epdd.errors import PlacementError
from epdd.fleet import placement_watcher
from epdd.fleet.placement_watcher import PlacementWatcher, keep_names
from epdd.fleet.worker import State
from epdd.hardware import binding
from epdd.wire import WorkerSpec
from tests.dispatch.fleet import expected, request, running

CPU = min(os.sched_getaffinity(0))
ALLOWED = frozenset(os.sched_getaffinity(0))
several_cpus = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs")


def spec(name, cpus=(CPU,), **more):
    return WorkerSpec(name, name.partition("/")[0], "cpu", cpus, None, len(cpus), "{}", **more)


def specs_of(fleet):
    return [worker.spec for worker in fleet.supervisor.workers]


def pids(fleet):
    return {worker.name: worker.process.pid for worker in fleet.supervisor.workers if worker.process}


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_worker_with_another_placement_moves_and_the_others_stay():
    async with running(encoders=2) as fleet:
        before = pids(fleet)
        wanted = [replace(s, cpus=(CPU,)) if s.name == "encoder/1" else s for s in specs_of(fleet)]
        changes = fleet.supervisor.reconcile(wanted)
        assert changes == [f"encoder/1 moves from any CPUs to CPUs {CPU}"]
        assert not fleet.supervisor.find("encoder/1").takes_work
        await until(lambda: pids(fleet).get("encoder/1") not in (None, before["encoder/1"]))
        await fleet.ready()
        assert pids(fleet) | {"encoder/1": 0} == before | {"encoder/1": 0}
        assert fleet.supervisor.find("encoder/1").ready.binding.cpus == (CPU,)
        assert fleet.supervisor.reconcile(specs_of(fleet)) == []


async def test_work_in_flight_is_placed_again():
    async with running(encoders=2, encode_s=0.3) as fleet:
        asks = [asyncio.create_task(fleet.ask(request(f"r{i}", b"%d" % i))) for i in range(4)]
        await until(lambda: all(worker.in_flight for worker in fleet.supervisor.role("encoder")))
        gone = fleet.supervisor.find("encoder/1")
        changes = fleet.supervisor.reconcile([s for s in specs_of(fleet) if s.name != "encoder/1"])
        assert changes == ["encoder/1 stops, there is no place for it"]
        assert await asyncio.gather(*asks) == [[expected(b"%d" % i)] for i in range(4)]
        assert [worker.name for worker in fleet.supervisor.workers] == ["encoder/0", "pd/0"]
        assert gone.state is State.GONE and gone.process is None
        await fleet.at_rest()


async def test_more_room_is_more_workers():
    async with running(encoders=1) as fleet:
        more = replace(fleet.supervisor.find("encoder/0").spec, name="encoder/1")
        assert fleet.supervisor.reconcile([*specs_of(fleet), more]) == ["encoder/1 starts on any CPUs"]
        assert [worker.name for worker in fleet.supervisor.workers] == ["encoder/0", "encoder/1", "pd/0"]
        await fleet.ready()
        fleet.supervisor.drain("encoder/0")
        assert await fleet.ask(request("r", b"a")) == [expected(b"a")]
        assert fleet.supervisor.find("encoder/1").done == 1


async def test_a_worker_wanted_again_while_it_ends_comes_back():
    async with running(encoders=2) as fleet:
        all_of_them, pid = specs_of(fleet), pids(fleet)["encoder/1"]
        fleet.supervisor.reconcile([s for s in all_of_them if s.name != "encoder/1"])
        fleet.supervisor.reconcile(all_of_them)
        await until(lambda: pids(fleet).get("encoder/1") not in (None, pid))
        await fleet.ready()
        assert [worker.name for worker in fleet.supervisor.workers] == ["encoder/0", "encoder/1", "pd/0"]


async def test_a_given_up_worker_with_another_placement_is_tried_again_and_without_one_is_removed():
    async with running(encoders=2, pds=0, bad_start=78) as fleet:
        await until(lambda: all(worker.state is State.FAILED for worker in fleet.supervisor.workers))
        first = fleet.supervisor.find("encoder/0").spec
        fleet.supervisor.reconcile([replace(first, cpus=(CPU,), model="{}")])
        assert [worker.name for worker in fleet.supervisor.workers] == ["encoder/0"]
        await fleet.ready()


async def test_a_look_plans_anew_only_when_something_changed(monkeypatch):
    async with running(encoders=1) as fleet:
        plans = []

        def plan():
            plans.append(specs_of(fleet))
            return plans[-1]

        watcher = PlacementWatcher(fleet.supervisor, plan)
        await watcher.check()
        assert plans == []
        await watcher.check(plan_anew=True)
        assert len(plans) == 1 and watcher.changes == []
        monkeypatch.setattr(placement_watcher, "_allowed", lambda: (frozenset({CPU}), frozenset({7})))
        await watcher.check()
        await watcher.check()
        assert len(plans) == 2


async def test_where_no_plan_fits_all_stay_and_it_is_told(monkeypatch):
    async with running(encoders=1) as fleet:
        def plan():
            raise PlacementError("1 physical cores are free; asked for: 2 x pd with 8 threads")

        watcher, before = PlacementWatcher(fleet.supervisor, plan), pids(fleet)
        await watcher.check(plan_anew=True)
        assert watcher.error == "1 physical cores are free; asked for: 2 x pd with 8 threads"
        assert pids(fleet) == before
        watcher._plan = lambda: specs_of(fleet)
        await watcher.check(plan_anew=True)
        assert watcher.error == ""


@several_cpus
async def test_threads_moved_by_somebody_else_are_bound_again():
    async with running(encoders=1) as fleet:
        watcher = PlacementWatcher(fleet.supervisor, lambda: specs_of(fleet))
        fleet.supervisor.reconcile([replace(s, cpus=(CPU,)) for s in specs_of(fleet)])
        await until(lambda: all(worker.takes_work and worker.restarts for worker in fleet.supervisor.workers))
        before = pids(fleet)
        for pid in before.values():
            os.sched_setaffinity(pid, ALLOWED)
        await watcher.check()
        assert [binding.threads(pid) for pid in before.values()] == [{pid: {CPU}} for pid in before.values()]
        assert pids(fleet) == before


async def test_lost_memory_binding_is_a_new_start(monkeypatch):
    async with running(encoders=1) as fleet:
        watcher, before = PlacementWatcher(fleet.supervisor, lambda: specs_of(fleet)), pids(fleet)
        lost = binding.folder(before["encoder/0"])
        real = binding.memory_nodes
        monkeypatch.setattr(binding, "memory_nodes", lambda process: (5,) if process == lost else real(process))
        await watcher.check()
        await until(lambda: pids(fleet).get("encoder/0") not in (None, before["encoder/0"]))
        await fleet.ready()
        assert pids(fleet)["pd/0"] == before["pd/0"]


async def test_what_proc_does_not_tell_is_no_loss(monkeypatch):
    async with running(encoders=1) as fleet:
        watcher, before = PlacementWatcher(fleet.supervisor, lambda: specs_of(fleet)), pids(fleet)
        monkeypatch.setattr(binding, "policy", lambda process: ("", set()))
        monkeypatch.setattr(binding, "memory_nodes", lambda process: (5,))
        await watcher.check()
        await asyncio.sleep(0.3)
        assert pids(fleet) == before


def test_who_sits_right_keeps_its_name():
    now = [spec("encoder/0", (0,)), spec("encoder/1", (1,)), spec("pd/0", (2,))]
    wanted = [spec("encoder/0", (1,), log_level="debug"), spec("encoder/1", (5,)), spec("encoder/2", (6,)),
              spec("pd/0", (2,))]
    kept = {s.name: s for s in keep_names(now, wanted)}
    assert {name: s.cpus for name, s in kept.items()} == {
        "encoder/1": (1,), "encoder/0": (5,), "encoder/2": (6,), "pd/0": (2,)}
    assert kept["encoder/1"].log_level == "debug"


def test_two_with_one_placement_are_two():
    now = [spec("encoder/0"), spec("encoder/1")]
    assert [s.name for s in keep_names(now, [spec("encoder/0"), spec("encoder/1"), spec("encoder/2")])] == [
        "encoder/0", "encoder/1", "encoder/2"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
async def test_the_daemons_signals_end_nobody_else(number):
    """A closed terminal sends SIGHUP to every process, `systemctl kill --signal=USR1` SIGUSR1."""
    async with running(encoders=1) as fleet:
        before = pids(fleet)
        helpers = [forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid]
        for pid in (*before.values(), *helpers):
            os.kill(pid, number)
        assert await fleet.ask(request("r", b"a")) == [expected(b"a")]
        for pid in helpers:
            assert "zombie" not in Path(f"/proc/{pid}/status").read_text()
        assert pids(fleet) == before


async def test_what_cannot_be_read_for_the_moment_moves_nobody(monkeypatch):
    async with running(encoders=1) as fleet:
        planned = []
        watcher = PlacementWatcher(fleet.supervisor, lambda: planned.append(1) or [])
        monkeypatch.setattr(binding, "allowed_nodes", lambda process=None: set())      # no descriptor for /proc
        await watcher.check()
        assert not planned and not watcher.changes
