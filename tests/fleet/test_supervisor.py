"""Workers die, hang, break the wire format and fail to start; the supervisor restores the fleet."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from multiprocess import forkserver

from epdd.errors import NotFound, Rejected
from epdd.fleet import exits, stall_detector, supervisor
from epdd.fleet.worker import State
from epdd.settings.config import Config
from tests.dispatch.fleet import FORK_SERVER, expected, request, running


async def test_a_killed_worker_is_back_with_a_new_pid():
    async with running(encoders=1) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        before = worker.process.pid
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(60):
            while worker.process is None or worker.process.pid == before or worker.state is not State.READY:
                await asyncio.sleep(0.01)
        assert worker.restarts == 1 and not psutil.pid_exists(before)


async def test_a_worker_that_breaks_the_wire_format_is_replaced():
    async with running(encoders=1, garble="noise") as fleet:
        with pytest.raises(Rejected):
            await fleet.ask(request("r", b"noise"))
        await fleet.ready()
        assert await fleet.ask(request("next", b"ok")) == [expected(b"ok")]


async def test_a_worker_that_dies_at_start_is_tried_a_few_times_and_given_up():
    config = Config().with_values("fleet", {"max_failures": 3, "backoff_s": 0.01}, "test")
    async with running(encoders=1, pds=0, config=config, bad_start=1) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        async with asyncio.timeout(60):
            while worker.state is not State.FAILED:
                await asyncio.sleep(0.01)
        assert worker.restarts == 2
        assert worker.last_error == "died 3 times in a row, the last time: exit code 1: no weights here"


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_worker_that_dies_soon_after_ready_again_and_again_is_given_up_and_resumed():
    config = Config().with_values("fleet", {"max_failures": 3, "backoff_s": 0.05}, "test")
    async with running(encoders=1, pds=0, config=config, life_s=0.1) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        began = time.monotonic()
        await until(lambda: worker.state is State.FAILED)
        assert time.monotonic() - began > 0.05 + 0.1        # it waited, and twice as long the second time
        assert worker.restarts == 2 and worker.was_ready
        assert worker.last_error == "died 3 times in a row, the last time: exit code 3"
        fleet.supervisor.resume("encoder/0")
        await until(lambda: worker.state is State.READY)
        assert "3 times" in worker.last_error               # an operator may still ask what it was
        await until(lambda: worker.state is State.FAILED)   # as patiently as the first time
        assert worker.restarts == 4


async def test_an_operator_need_not_wait_for_the_next_try():
    config = Config().with_values("fleet", {"backoff_s": 100.0}, "test")
    async with running(encoders=1, config=config) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        for verb in (fleet.supervisor.resume, fleet.supervisor.restart):
            pid, restarts = worker.process.pid, worker.restarts
            worker.process.kill()
            await until(lambda: worker.process is None)
            verb("encoder/0")
            await back(fleet, worker, pid)
            assert worker.restarts == restarts + 1


async def test_deaths_of_a_worker_that_was_well_in_between_are_not_added_up():
    config = Config().with_values("fleet", {"max_failures": 2, "backoff_s": 100.0, "min_uptime_s": 0.0}, "test")
    async with running(encoders=1, pds=0, config=config, life_s=0.1) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        await until(lambda: worker.restarts == 4)           # at once each time
        assert worker.state is not State.FAILED


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
        async with asyncio.timeout(60):
            while worker.process is None or worker.process.pid == pid or worker.state is not State.READY:
                await asyncio.sleep(0.01)
        fleet.supervisor.drain("encoder/0")
        assert worker.state is State.DRAINING
        with pytest.raises(NotFound):
            fleet.supervisor.drain("encoder/7")


async def back(fleet, worker, pid, state=State.READY):
    """Wait until `worker` is another process than `pid`, in `state`."""
    async with asyncio.timeout(60):
        while worker.process is None or worker.process.pid == pid or worker.state is not state:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 3])
async def test_no_signal_costs_the_worker_its_keeper(number):
    async with running(encoders=1, encode_s=0.2) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        pid = worker.process.pid
        ask = asyncio.create_task(fleet.ask(request("r", b"a")))
        while not worker.in_flight:
            await asyncio.sleep(0.01)
        os.kill(pid, number)
        assert await ask == [expected(b"a")]
        assert worker.process.pid != pid


async def test_a_listener_that_fails_costs_no_worker():
    async with running(encoders=1) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        listens = fleet.supervisor._on_change

        def fails(worker):
            listens(worker)
            raise OSError("the terminal is gone")

        fleet.supervisor._on_change = fails
        pid = worker.process.pid
        worker.process.kill()
        await back(fleet, worker, pid)
        assert worker.restarts == 1 and await fleet.ask(request("r", b"a")) == [expected(b"a")]


async def test_no_descriptor_left_is_a_failure_like_others(monkeypatch):
    config = Config().with_values("fleet", {"backoff_s": 0.01}, "test")
    async with running(encoders=1, config=config) as fleet:
        worker, real = fleet.supervisor.find("encoder/0"), supervisor.socket_pair

        def full():
            monkeypatch.setattr(supervisor, "socket_pair", real)
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(supervisor, "socket_pair", full)
        pid = worker.process.pid
        worker.process.kill()
        await back(fleet, worker, pid)
        assert worker.restarts == 2


async def test_resumed_twice_is_one_process():
    async with running(encoders=1, pds=0, bad_start=78) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        async with asyncio.timeout(60):
            while worker.state is not State.FAILED:
                await asyncio.sleep(0.01)
        fleet.supervisor.resume("encoder/0")
        fleet.supervisor.resume("encoder/0")
        assert worker.state is State.STARTING
        assert [task.get_name() for task in fleet.supervisor._tasks if not task.done()] == ["watch", "encoder/0"]


async def test_out_of_rotation_also_after_a_crash_and_until_resumed():
    async with running(encoders=1) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        fleet.supervisor.drain("encoder/0")
        pid = worker.process.pid
        worker.process.kill()
        await back(fleet, worker, pid, State.DRAINING)
        fleet.supervisor.resume("encoder/0")
        assert await fleet.ask(request("r", b"a")) == [expected(b"a")]


async def test_after_a_freeze_of_the_whole_service_no_worker_is_taken_for_hung(monkeypatch):
    monkeypatch.setattr(stall_detector, "CHECK_INTERVAL_S", 0.1)
    config = Config().with_values("fleet", {"stall_s": 2.0}, "test")
    async with running(encoders=1, config=config) as fleet:
        workers = fleet.supervisor.workers
        before = [worker.process.pid for worker in workers]
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)
        thawed = time.monotonic()
        for pid in before:
            os.kill(pid, signal.SIGCONT)
        while any(worker.channel.last_heard < thawed for worker in workers):
            await asyncio.sleep(0.01)
            assert [worker.last_error for worker in workers] == ["", ""]
        assert [worker.process.pid for worker in workers] == before


class Stuck:
    """A fork server that never answers until it is killed; then another replaces it."""

    pid = None

    def __init__(self, gone):
        self.gone = gone

    async def spawn(self, *args):
        await self.gone.wait()
        raise EOFError

    def stop(self):
        self.gone.set()


async def test_a_fork_server_that_never_answers_is_replaced(monkeypatch):
    monkeypatch.setattr(stall_detector, "CHECK_INTERVAL_S", 0.02)
    async with running(encoders=1, config=Config().with_values("fleet", {"backoff_s": 0.01}, "test")) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        stuck = fleet.supervisor._fork_server = Stuck(asyncio.Event())
        pid = worker.process.pid
        worker.process.kill()
        async with asyncio.timeout(60):
            while worker.state is not State.STARTING:
                await asyncio.sleep(0.01)
            worker.began -= Config().fleet.start_timeout_s
            await stuck.gone.wait()
        fleet.supervisor._fork_server = FORK_SERVER
        await back(fleet, worker, pid)


async def test_the_fork_servers_death_costs_nothing_but_time():
    async with running(encoders=1) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        assert await fleet.ask(request("r", b"a")) == [expected(b"a")]
        pid = worker.process.pid
        worker.process.kill()
        await back(fleet, worker, pid)


async def test_a_stopped_fork_server_is_gone_when_the_next_is_asked_for():
    async with running(encoders=1):
        pid = forkserver._forkserver._forkserver_pid
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_exits_are_told_in_words():
    assert "by an operator, the stall detector or the kernel's OOM killer" in exits.describe(-9)
    assert "out of memory" in exits.describe(-9, out_of_memory=True)
    assert exits.describe(-15) == "ended by SIGTERM"
    assert exits.describe(-37) == "ended by signal 37"
    assert exits.describe(78) == "exit code 78"


@pytest.mark.parametrize("version", [1, 2])
def test_a_death_for_memory_is_told_from_others_by_the_kernels_count(tmp_path, version):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("proc/mounts", f"x /cg cgroup{2 if version == 2 else ''} rw,memory 0 0\n")
    for pid in (7, 8):
        write(f"proc/{pid}/cgroup", f"{'0::' if version == 2 else '4:memory:'}/svc/epdd\n")
    name = "memory.events" if version == 2 else "memory.oom_control"
    write(f"cg/svc/{name}", "oom 9\noom_kill 9\n")
    write(f"cg/svc/epdd/{name}", "oom 5\noom_kill 2\n")
    kills = exits.OomKills(tmp_path)
    count = kills.watch(7)
    assert count == kills.watch(8) == tmp_path / f"cg/svc/epdd/{name}"
    assert not kills.killed_one(count)                # killed by hand
    write(f"cg/svc/epdd/{name}", "oom 5\noom_kill 4\n")
    assert [kills.killed_one(count), kills.killed_one(count), kills.killed_one(count)] == [True, True, False]
    write(f"cg/svc/epdd/{name}", "oom 6\noom_kill 5\n")
    kills.watch(7)                              # a death before this process does not count
    assert not kills.killed_one(count)
    assert kills.watch(9) is None and not kills.killed_one(None)


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
    """Whether it still runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
