"""What the daemon tells the service manager, and what a reload sets going."""

import asyncio

from epdd import daemon, families
from epdd.config import Config


async def test_a_reload_during_the_start_does_not_say_that_it_is_over(monkeypatch):
    told = []
    monkeypatch.setattr(daemon.systemd, "notify", lambda **state: told.append(list(state)))
    monkeypatch.setattr(daemon, "ForkServer", lambda preload: None)     # the real one sets this process's preload
    starting = daemon.Daemon(Config(), families.load(str(families.DEMO)), [], 1 << 20, [], list)
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
    started = daemon.Daemon(Config(), families.load(str(families.DEMO)), [], 1 << 20, [], plan)
    started._reload()
    async with asyncio.timeout(10):
        await planned.wait()
        while started._background:
            await asyncio.sleep(0.01)
