import os
import socket
import time

import pytest

from epdd import systemd


@pytest.fixture(params=["file", "abstract"])
def manager(request, tmp_path, monkeypatch):
    """A socket as systemd gives it, and its address in the environment."""
    address = str(tmp_path / "notify") if request.param == "file" else f"\0epdd-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.settimeout(60)
        yield sock


def test_state_arrives(manager):
    assert systemd.notify(READY=1, STATUS="2 encoders,\n1 pd")
    assert manager.recv(4096) == b"READY=1\nSTATUS=2 encoders, 1 pd"


@pytest.mark.parametrize("manager", ["file"], indirect=True)
def test_a_manager_that_does_not_read_stops_nothing(manager):
    began = time.monotonic()
    while systemd.notify(WATCHDOG=1):
        assert time.monotonic() - began < 10
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("address", [None, "", "relative", "/nowhere/notify"])
def test_nobody_listens(monkeypatch, address):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not systemd.notify(READY=1)


@pytest.mark.parametrize("usec, pid, seconds", [
    ("3000000", None, 1.5), ("3000000", "", 1.5), ("3000000", "own", 1.5), ("3000000", "1", None),
    (None, None, None), ("0", None, None), ("soon", None, None)])
def test_watchdog_interval(monkeypatch, usec, pid, seconds):
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(os.getpid()) if value == "own" else value)
    assert systemd.watchdog_interval() == seconds
