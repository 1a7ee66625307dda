"""Hung and slow workers, distinguished by the kernel's counters."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from epdd.errors import Rejected
from epdd.fleet import stall_detector
from epdd.fleet.process import Process, progress_counters
from epdd.fleet.worker import State
from epdd.settings.config import Config
from tests.dispatch.fleet import FORK_SERVER, expected, request, running


@pytest.fixture(autouse=True)
def watch_often(monkeypatch):
    monkeypatch.setattr(stall_detector, "CHECK_INTERVAL_S", 0.1)


def with_stall(seconds):
    return Config().with_values("fleet", {"stall_s": seconds}, "test")


async def test_a_worker_that_computes_without_a_word_is_not_taken_for_hung():
    async with running(encoders=1, spin="hard", spin_s=4.0, config=with_stall(1.0)) as fleet:
        worker, longest = fleet.supervisor.find("encoder/0"), 0.0
        ask = asyncio.create_task(fleet.ask(request("r", b"hard")))
        while not ask.done():
            longest = max(longest, time.monotonic() - worker.channel.last_heard)
            await asyncio.sleep(0.05)
        assert await ask == [expected(b"hard")]
        assert longest > 2.0 and worker.restarts == 0


async def test_a_worker_that_computes_for_ever_is_replaced(monkeypatch):
    monkeypatch.setattr(stall_detector, "SLOW_MIN_S", 0.0)
    monkeypatch.setattr(stall_detector, "SLOW_FACTOR", 1.0)
    config = with_stall(1.0).with_values("fleet", {"stall_s": 1.0, "backoff_s": 0.01}, "test")
    async with running(encoders=1, spin="hard", spin_s=3600, config=config) as fleet:
        with pytest.raises(Rejected):
            await fleet.ask(request("r", b"hard"))
        assert "computing" in fleet.supervisor.find("encoder/0").last_error
        assert await fleet.ask(request("next", b"ok")) == [expected(b"ok")]


async def test_a_worker_that_hangs_in_a_system_call_is_replaced_though_its_work_could_excuse_it(monkeypatch):
    monkeypatch.setattr(stall_detector, "SLOW_MIN_S", 3600.0)
    async with running(encoders=2, hang="forever", config=with_stall(1.0)) as fleet:
        with pytest.raises(Rejected):
            await fleet.ask(request("r", b"forever"))
        assert all("standing still" in worker.last_error for worker in fleet.supervisor.role("encoder"))
        await fleet.ready()
        assert await fleet.ask(request("next", b"ok")) == [expected(b"ok")]


@pytest.mark.parametrize("name", ["encoder/0", "pd/0"])
async def test_a_stopped_worker_is_replaced_and_its_work_placed_again(monkeypatch, name):
    monkeypatch.setattr(stall_detector, "SLOW_MIN_S", 3600.0)
    manners = {"encode_s": 0.5} if name == "encoder/0" else {"token_s": 0.5}
    async with running(encoders=1, config=with_stall(1.0), **manners) as fleet:
        worker = fleet.supervisor.find(name)
        ask = asyncio.create_task(fleet.ask(request("r", b"a", whole=True)))
        while not worker.in_flight:
            await asyncio.sleep(0)
        os.kill(worker.process.pid, signal.SIGSTOP)
        assert await ask == [expected(b"a")]
        assert worker.restarts == 1 and "standing still" in worker.last_error


@pytest.mark.parametrize("expected_s, still, limit_s", [
    (0.0, True, 1.0), (30.0, True, 31.0),               # who waits for a GPU has the time that its work takes
    (0.2, False, 61.0), (30.0, False, 601.0)])          # who computes has many times that
async def test_how_long_a_worker_may_be_silent(monkeypatch, expected_s, still, limit_s):
    async with running(encoders=1, config=with_stall(1.0)) as fleet:
        watch, worker, now = fleet.supervisor.stall_detector, fleet.supervisor.find("encoder/0"), time.monotonic()
        killed = []
        monkeypatch.setattr(worker.process, "kill", lambda: killed.append(worker.fault))
        monkeypatch.setattr(watch, "_idle_s", lambda pid, now: 60.0 if still else 0.0)
        worker.channel.works["e"] = type("Work", (), {"expected_s": expected_s})()
        for silent in (limit_s - 0.5, limit_s + 0.5):
            worker.channel.last_heard = now - silent
            assert not killed
            watch._check_silence(worker, now)
        assert killed == [f"silent for {limit_s + 0.5:.0f} s, {'standing still' if still else 'computing'}"]
        worker.channel.works.clear()


async def test_a_fork_server_that_stands_still_is_replaced():
    async with running(encoders=1, config=with_stall(1.0)) as fleet:
        worker, server = fleet.supervisor.find("encoder/0"), FORK_SERVER.pid
        os.kill(server, signal.SIGSTOP)
        worker.process.kill()
        assert await fleet.ask(request("r", b"a")) == [expected(b"a")]
        assert FORK_SERVER.pid != server and worker.restarts == 2
        assert worker.last_error.startswith("cannot fork")


def test_effort_tells_work_from_standing_still():
    with subprocess.Popen([sys.executable, "-c", "import sys\nprint(flush=True)\nsys.stdin.read(1)\nwhile True: pass"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        before = None
        while before is None or progress_counters(process.pid) != before:      # until it waits in a system call
            before = progress_counters(process.pid)
            time.sleep(0.1)
        process.stdin.write(b"x")
        process.stdin.flush()
        while progress_counters(process.pid) == before:
            pass                                    # it runs, or has run meanwhile
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = progress_counters(process.pid)
        time.sleep(0.1)
        assert stopped is not None and progress_counters(process.pid) == stopped
        process.kill()
    assert progress_counters(process.pid) is None


async def test_nobody_waits_for_a_worker_that_the_kernel_holds_and_its_leases_stay_held(monkeypatch):
    monkeypatch.setattr(stall_detector, "KILL_TIMEOUT_S", 0.3)
    async with running(encoders=2, encode_s=0.5, config=with_stall(1.0)) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        fleet.supervisor.drain("encoder/1")
        ask = asyncio.create_task(fleet.ask(request("r", b"a")))
        while not worker.in_flight:
            await asyncio.sleep(0)
        fleet.supervisor.resume("encoder/1")
        pid = worker.process.pid
        held, = fleet.cache._entries.values()
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(Process, "signal", lambda self, number: None)     # no signal arrives any more
            assert await ask == [expected(b"a")]
            assert worker.state is State.FAILED and f"pid {pid} was killed and does not exit" in worker.last_error
            fleet.supervisor.resume("encoder/0")        # there is no second one beside it
            assert worker.process.pid == pid
            embedding, = fleet.cache._entries.values()     # other bytes: it may still write to those it has
            assert held.pins == 1 and worker.in_flight == 1
            assert embedding is not held and embedding.lease.offset != held.lease.offset
        os.kill(pid, signal.SIGKILL)
        await fleet.ready()
        assert worker.process.pid != pid
        await fleet.at_rest()
