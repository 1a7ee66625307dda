"""Other users of the machine: epdctl and the daemon do not trust their folders, sockets and listeners."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

from epdd.ctl import client, peer
from epdd.ctl.main import main
from tests.ctl.fake_daemon import FakeDaemon

NOBODY = 65534
WAIT_S = 60         # a hang guard
KEY = "sk-of-the-operator"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user as well")


@contextmanager
def stranger(listener, answer=b""):
    """Another user listens; yields a function that ends it and returns the bytes it got.

    `listener()` makes its socket, as that user.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with listener() as sock:
                sock.listen()
                os.write(write, b"listening\n")
                while True:
                    taken, _ = sock.accept()
                    os.write(write, taken.recv(1 << 16))
                    with suppress(OSError):     # it has ended without output
                        taken.sendall(answer)
        finally:
            os._exit(1)
    os.close(write)
    assert os.read(read, 100) == b"listening\n"

    def told():
        os.kill(child, signal.SIGKILL)
        with os.fdopen(read, "rb") as stream:
            return stream.read()

    try:
        yield told
    finally:
        os.waitpid(child, 0)


def unix(path):
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    return sock


def tcp():
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


@pytest.fixture
def shared(tmp_path):
    """A folder like /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    tmp_path.chmod(0o711)
    for place in tmp_path.parents:
        if place.stat().st_mode & 0o001 == 0:
            place.chmod(place.stat().st_mode | 0o001)       # pytest's own, below /tmp
    return folder


@as_root
def test_a_folder_that_somebody_else_made(shared, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setattr(client, "SYSTEM_DIR", shared / "none")
    folder = shared / "epdd"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    for mode in (0o755, 0o777):
        folder.chmod(mode)
        with stranger(lambda: unix(folder / f"admin-{mode}.sock"), b'{"ok":true,"result":{}}\n') as told:
            assert main(["status"]) == 1
            assert main(["--socket", str(folder / f"admin-{mode}.sock"), "status"]) == 1
            assert told() == b""
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4 and all(f"{folder} is user {NOBODY}'s" in line for line in said)
    # Nor does a daemon start there.
    done = subprocess.run([sys.executable, "-m", "epdd", "--port", "0", "--emulate", "router-table",
                           "--set", "arena.bytes=0x4000000"], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 78 and f"admin.socket: {folder} is user {NOBODY}'s" in done.stderr
    done = subprocess.run([sys.executable, "-m", "epdd", "--port", "0", "--emulate", "router-table",
                           "--set", "arena.bytes=0x4000000", "--set", f"server.unix_socket={folder}/api"],
                          capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 78 and "server.unix_socket: " in done.stderr


@as_root
def test_somebody_else_who_listens_in_our_folder_is_told_nothing(shared, capsys):
    folder = shared / "run"
    folder.mkdir()
    folder.chmod(0o777)
    with stranger(lambda: unix(folder / "s"), b'{"ok":true,"result":{}}\n') as told:
        folder.chmod(0o700)
        with pytest.raises(peer.Stranger, match=f"user {NOBODY} listens there"):
            peer.connect(folder / "s", 5.0)
        assert main(["--socket", str(folder / "s"), "status"]) == 1
        assert told() == b""
    assert "nothing was sent" in capsys.readouterr().err


@as_root
def test_a_daemon_that_root_started_for_another_user_is_believed(shared):
    folder = shared.parent / "run"      # like /run/epdd: made by root for the service's user
    folder.mkdir(0o755)
    os.chown(folder, NOBODY, NOBODY)
    with stranger(lambda: unix(folder / "s"), b'{"ok":true,"result":"1.0"}\n') as told:
        assert client.ask(folder / "s", "version") == "1.0"
        assert b"version" in told()


@as_root
def test_the_key_goes_to_nobody_but_the_daemon(shared, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(client.KEY_VARIABLE, KEY)
    read, write = os.pipe()

    def listener():
        sock = tcp()
        os.write(write, b"%d\n" % sock.getsockname()[1])
        return sock

    with stranger(listener) as told, FakeDaemon(tmp_path / "s", {"status": {"listen": {
            "host": "127.0.0.1", "port": int(os.read(read, 10))}}}) as daemon:
        assert main(["--socket", daemon.server_address, "chat", "hello"]) == 1
        assert told() == b""
    said = capsys.readouterr().err
    assert f"user {NOBODY} listens there" in said and "no API key was sent" in said and KEY not in said


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_whose_listener_it_is(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listening, socket.socket(family) as calling:
        try:
            listening.bind((address, 0))
        except OSError:
            pytest.skip(f"no {address} here")
        listening.listen()
        calling.connect(("::1" if ":" in address else "127.0.0.1", listening.getsockname()[1]))
        peer.check_listener(calling, os.geteuid())
        if os.geteuid():
            with pytest.raises(peer.Stranger):
                peer.check_listener(calling, os.geteuid() + 1)
        taken, _ = listening.accept()
        listening.close()
        with taken, pytest.raises(peer.Stranger, match="nobody"):
            peer.check_listener(calling, os.geteuid())


def test_nothing_in_a_reply_steers_the_terminal(tmp_path, capsys):
    nasty = "\x1b]0;pwned\x07\x1b[31mred\x9b2J\rover"
    with FakeDaemon(tmp_path / "s", {"drain": ValueError(nasty), "version": nasty, "resume": nasty,
                                     "explain": [{nasty: nasty}]}) as daemon:
        for argv in (["drain", "x"], ["version"], ["resume", "x"]):
            main(["--socket", daemon.server_address, *argv])
        assert client.ask(daemon.server_address and tmp_path / "s", "explain")[0].keys().isdisjoint({nasty})
    said = "".join(capsys.readouterr())
    assert "\\x1b[31mred\\x9b2J" in said and not set("\x1b\x07\x9b\r") & set(said)
    assert json.dumps(nasty) not in said
