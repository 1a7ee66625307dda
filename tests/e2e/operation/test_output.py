"""stdout and stderr that nobody reads, or that are closed; signals and reloads log their outcome."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from epdd.ctl.main import main as epdctl
from tests.e2e.daemon import ROOT, running
from tests.e2e.operation.test_surroundings import ASK, LIGHT, metric

GUARD_S = 120       # hangs only


@contextmanager
def full_pipe(path):
    """A full FIFO that is open and not read; yields its descriptor."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
    try:
        while True:
            os.write(pipe, b"x" * 4096)
    except BlockingIOError:
        pass
    try:
        yield pipe
    finally:
        os.close(pipe)


@pytest.mark.parametrize("where", ["2", "1"])
def test_a_reader_that_stops_holds_up_nothing(started_by, tmp_path, where):
    """Start, requests, reloads and stop go on; lines written meanwhile come once it reads again."""
    with full_pipe(tmp_path / "pipe") as pipe:
        started_by(f'exec "$@" {where}> {tmp_path}/pipe')
        with running(**LIGHT) as daemon:
            daemon.ready()
            daemon.process.send_signal(signal.SIGHUP)
            assert daemon.post(ASK)[0] == 200
            assert metric(daemon, "epdd_log_dropped_total") == 0        # it waits in the queue
            if where == "1":
                daemon.wait(lambda status: "reloaded level=" in daemon.log(), 20)   # stderr is not held up by it
                return      # stopped by running() with the pipe still full
            seen, deadline = b"", time.monotonic() + GUARD_S
            while b"reloaded level=" not in seen and time.monotonic() < deadline:
                try:
                    seen += os.read(pipe, 65536)
                except BlockingIOError:
                    time.sleep(0.02)
            assert b"listens host=" in seen and b"reloaded level=" in seen


def test_stopped_while_its_log_is_stuck(started_by, tmp_path):
    with full_pipe(tmp_path / "pipe"):
        started_by(f'exec "$@" 2> {tmp_path}/pipe > {tmp_path}/pipe')
        with running(**LIGHT) as daemon:
            daemon.ready()
        assert daemon.process.returncode == 0       # within the time that running() gives


def test_without_stderr(started_by):
    started_by('exec "$@" <&- 2>&-')
    with running(**LIGHT) as daemon:
        daemon.ready()
        assert daemon.post(ASK)[0] == 200
        assert "stderr is closed, so log lines are dropped" in daemon.log()
        links = [os.readlink(f"/proc/{daemon.process.pid}/fd/{number}") for number in (0, 2)]
        assert links == ["/dev/null"] * 2       # and no socket took their numbers
        for worker in daemon.status()["workers"]:
            assert os.readlink(f"/proc/{worker['pid']}/fd/2") == "/dev/null"


def test_sigusr1_opens_the_request_log_again(tmp_path):
    path = tmp_path / "requests.jsonl"
    with running(**LIGHT, log__requests=path) as daemon:
        daemon.ready()
        assert daemon.post(ASK)[0] == 200
        daemon.wait(lambda status: metric(daemon, "epdd_request_log_lines_total") == 1, 120)
        path.rename(tmp_path / "moved")
        daemon.process.send_signal(signal.SIGUSR1)
        assert daemon.ask("version")        # the signal came before this answer
        assert daemon.post(ASK)[0] == 200
        daemon.wait(lambda status: metric(daemon, "epdd_request_log_lines_total") == 2, 120)
        assert len(path.read_text().splitlines()) == len((tmp_path / "moved").read_text().splitlines()) == 1


def test_a_refused_reload_fails_with_the_reason(tmp_path, capsys):
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    with running(**LIGHT, server__api_keys_file=keys) as daemon:
        command = ["--socket", str(daemon.socket_path), "reload"]
        assert epdctl(command) == 0 and capsys.readouterr().out == "reloaded\n"
        keys.write_text("")
        assert epdctl(command) == 1
        assert str(keys) in capsys.readouterr().err
        keys.write_text("two\n")
        assert epdctl(command) == 0


def test_a_port_that_is_taken_may_be_tried_again():
    with running(**LIGHT) as daemon:
        second = subprocess.run([sys.executable, "-m", "epdd", "--port", str(daemon.port), "--emulate", "router-table"],
                                cwd=ROOT, capture_output=True, text=True, timeout=GUARD_S)
    assert second.returncode == 75      # systemd's RestartPreventExitStatus names 78 only
    assert f"epdd: cannot listen on 127.0.0.1:{daemon.port}: " in second.stderr and "Traceback" not in second.stderr


def test_ctrl_c_while_it_starts_shows_no_traceback():
    process = subprocess.Popen([sys.executable, "-m", "epdd", "--port", "0"], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while "/uvloop/" not in open(f"/proc/{process.pid}/maps").read():     # it is being imported
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=GUARD_S)
    assert process.returncode in (0, 130) and "Traceback" not in said, said
