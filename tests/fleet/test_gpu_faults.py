"""A GPU that fails under its worker is checked before the next process, and given up after a limit."""

import asyncio

import pytest

from epdd.dispatch.routing.replicas import GPU
from epdd.errors import DeviceError, Rejected
from epdd.fleet import exits
from epdd.fleet.worker import State
from epdd.hardware import gpus
from epdd.settings.config import Config
from tests.dispatch.fleet import GUARD_S, expected, request, running

pytestmark = pytest.mark.takes(30)


async def until(condition):
    async with asyncio.timeout(GUARD_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_its_exit_code_is_its_own():
    assert exits.describe(DeviceError.exit_code) == "exit code 79: its GPU failed"


async def test_a_worker_whose_gpu_is_there_comes_back():
    async with running(encoders=1, devices={"encoder/0": "cuda:0"}, cuda_fault="assert") as fleet:
        worker = fleet.supervisor.find("encoder/0")
        with pytest.raises(Rejected):
            await fleet.ask(request("r1", b"assert"))
        await until(lambda: worker.restarts and worker.state is State.READY)
        assert worker.last_error == "exit code 79: its GPU failed: CUDA error: device-side assert triggered"


async def test_a_worker_whose_gpu_is_gone_is_given_up_at_once_and_others_serve(monkeypatch):
    asked = []
    monkeypatch.setattr(gpus, "lost", lambda index: asked.append(index) or "GPU is lost")
    async with running(encoders=2, devices={"encoder/0": "cuda:3"}, cuda_fault="assert") as fleet:
        worker = fleet.supervisor.find("encoder/0")
        fleet.supervisor.drain("encoder/1")
        lost = asyncio.create_task(fleet.ask(request("r1", b"assert")))
        await until(lambda: worker.state is State.FAILED)
        assert asked == [3] and worker.restarts == 0
        assert worker.last_error == ("GPU 3 is lost (GPU is lost): exit code 79: its GPU failed: "
                                     "CUDA error: device-side assert triggered")
        fleet.supervisor.resume("encoder/1")
        assert await fleet.ask(request("r2", b"one")) == [expected(b"one")]
        assert fleet.encoding.router.replicas.count[GPU] == 0
        lost.cancel()
        # An operator resumes it after a repair.
        monkeypatch.setattr(gpus, "lost", lambda index: "")
        fleet.supervisor.resume("encoder/0")
        await fleet.ready()
        await asyncio.gather(lost, return_exceptions=True)
        await fleet.at_rest()


async def test_a_gpu_that_fails_again_and_again_is_given_up():
    config = Config().with_values("fleet", {"max_failures": 2, "backoff_s": 0.01}, "test")
    async with running(encoders=1, pds=0, config=config, devices={"encoder/0": "cuda:0"},
                       bad_start=DeviceError.exit_code) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        await until(lambda: worker.state is State.FAILED)
        assert worker.restarts == 1
        assert worker.last_error.startswith("died 2 times in a row, the last time: exit code 79")
