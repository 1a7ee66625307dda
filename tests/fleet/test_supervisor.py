"""Workers die, hang, babble and cannot start; the supervisor keeps the fleet as it should be."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from epdd.config import Config
from epdd.errors import NotFound, WorkerLost
from epdd.fleet.supervisor import describe_exit
from epdd.fleet.worker import State
from tests.dispatch.fleet import expected, request, running


async def test_a_killed_worker_is_back_with_a_new_pid():
    async with running(encoders=1) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        before = worker.process.pid
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(5):
            while worker.process is None or worker.process.pid == before or worker.state is not State.READY:
                await asyncio.sleep(0.01)
        assert worker.restarts == 1 and not psutil.pid_exists(before)


async def test_a_worker_that_breaks_the_wire_format_is_replaced():
    async with running(encoders=1, garble="noise") as fleet:
        with pytest.raises(WorkerLost):
            await fleet.ask(request("r", b"noise"))
        await fleet.ready()
        assert await fleet.ask(request("next", b"ok")) == [expected(b"ok")]


async def test_a_worker_that_dies_at_start_is_tried_a_few_times_and_given_up():
    config = Config().with_values("fleet", {"failures_max": 3, "backoff_s": 0.01}, "test")
    async with running(encoders=1, pds=0, config=config, bad_start=1) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        async with asyncio.timeout(20):
            while worker.state is not State.FAILED:
                await asyncio.sleep(0.01)
        assert worker.restarts == 2 and worker.last_error == "exit code 1: no weights here"


async def test_stop_leaves_no_process_and_no_descriptor():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    async with running(encoders=1):
        pass                                    # the fork server's own descriptors are there from now on
    before = descriptors()
    async with running(encoders=3) as fleet:
        pids = [worker.process.pid for worker in fleet.supervisor.workers]
        assert len(set(pids)) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert descriptors() <= before + 1          # the arena of this fleet, which the daemon keeps to its end


async def test_restart_is_a_new_process_and_drain_shows():
    async with running(encoders=1) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        pid = worker.process.pid
        fleet.supervisor.restart("encoder/0")
        async with asyncio.timeout(5):
            while worker.process is None or worker.process.pid == pid or worker.state is not State.READY:
                await asyncio.sleep(0.01)
        fleet.supervisor.drain("encoder/0")
        assert worker.state is State.DRAINING
        with pytest.raises(NotFound):
            fleet.supervisor.drain("encoder/7")


def test_exits_are_told_in_words():
    assert "OOM" in describe_exit(-9)
    assert describe_exit(-15) == "ended by SIGTERM"
    assert describe_exit(78) == "exit code 78"


PARENT = """
import asyncio, sys
from tests.dispatch.fleet import running

async def main():
    async with running(encoders=2) as fleet:
        print(*(worker.process.pid for worker in fleet.supervisor.workers), flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_no_worker_outlives_a_killed_daemon():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True,
                              cwd=Path(__file__).parents[2])
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    children = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
    assert len(pids) == 3 and set(pids) <= set(children)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 5
    while any(map(running_process, children)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(running_process, children))


def running_process(pid):
    """Whether it still runs: a zombie that waits for its new parent does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
