"""What the daemon tells the service manager."""

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
