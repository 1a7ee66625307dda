"""The daemon's messages to the service manager, and reloads."""

import asyncio

import pytest

from epdd import checkpoint, daemon, families
from epdd.fleet.worker import State
from epdd.settings.config import Config
from epdd.wire import WorkerSpec


async def test_a_reload_during_the_start_does_not_say_that_it_is_over(monkeypatch):
    told = []
    monkeypatch.setattr(daemon.systemd, "notify", lambda **state: told.append(list(state)))
    monkeypatch.setattr(daemon, "ForkServer", lambda preload: None)     # the real one sets this process's preload
    starting = daemon.Daemon(Config(), checkpoint.look(str(families.DEMO)), [], 1 << 20, [], list)
    starting._reload()
    assert told == []
    starting._announced = True
    starting._reload()
    assert told == [["RELOADING", "MONOTONIC_USEC"], ["READY"]]


async def test_a_reload_plans_anew(monkeypatch):
    planned = asyncio.Event()
    loop = asyncio.get_running_loop()

    def plan():
        loop.call_soon_threadsafe(planned.set)
        return []

    monkeypatch.setattr(daemon, "ForkServer", lambda preload: None)
    started = daemon.Daemon(Config(), checkpoint.look(str(families.DEMO)), [], 1 << 20, [], plan)
    started._reload()
    async with asyncio.timeout(60):
        await planned.wait()
        while started._background:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("failed", "was_ready", "state", "exit_code"), [
    ("encoder/0", True, "degraded", 0),         # text is served still
    ("pd/0", True, "failed", 0),                # nothing is, but an operator may resume it
    ("encoder/0", False, "failed", 78),
    ("pd/0", False, "failed", 78),
])
async def test_a_role_given_up_ends_the_daemon_only_if_it_never_served(
        monkeypatch, failed, was_ready, state, exit_code):
    monkeypatch.setattr(daemon, "ForkServer", lambda preload: None)
    specs = [WorkerSpec(name, name[:-2], "cpu", (), None, 1, "") for name in ("encoder/0", "pd/0")]
    started = daemon.Daemon(Config(), checkpoint.look(str(families.DEMO)), specs, 1 << 20, [], list)
    for worker in started._supervisor.workers:
        worker.state, worker.was_ready = State.READY, worker.name != failed or was_ready
    worker = started._supervisor.find(failed)
    worker.state, worker.last_error = State.FAILED, "died 5 times in a row, the last time: exit code 1"
    started._changed(worker)
    assert started._status.state() == (state, [f"{failed} FAILED: {worker.last_error}"])
    assert (started._exit_code, started._stop.is_set()) == (exit_code, exit_code != 0)
