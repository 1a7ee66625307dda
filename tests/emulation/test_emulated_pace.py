"""Each encoder's share of the work, slow encoders, and router settings that change under load."""

import asyncio

import pytest

from epdd.settings.workers import RouterSettings
from tests.dispatch.fleet import expected, request, running


def shares(fleet):
    return [fleet.encoding.share(worker) for worker in fleet.supervisor.role("encoder")]


async def test_shares_are_of_the_patches_encoded():
    async with running(encoders=3) as fleet:
        assert shares(fleet) == [None, None, None]
        fleet.supervisor.drain("encoder/2")
        await fleet.ask(request("r", *(b"%d" % i for i in range(8))))
        done = [worker.done for worker in fleet.supervisor.role("encoder")]
        assert done[2] == 0 and shares(fleet) == [pytest.approx(count / 8, abs=0.01) for count in done]
        fleet.supervisor.drain("encoder/0")
        fleet.supervisor.resume("encoder/2")
        await fleet.ask(request("s", *(b"s%d" % i for i in range(8))))
        done = [worker.done for worker in fleet.supervisor.role("encoder")]
        assert shares(fleet) == [pytest.approx(count / 16, abs=0.01) for count in done]
        assert sum(shares(fleet)) == pytest.approx(1)
        await fleet.ask(request("again", b"1"))         # from the cache: no encoder's work
        assert [worker.done for worker in fleet.supervisor.role("encoder")] == done


@pytest.mark.parametrize("encode_s, long_s, slow", [(0.16, 0.0, True), (0.16, 60.0, False), (0.064, 0.0, False)])
async def test_slow_is_who_takes_longer_than_at_its_start_for_long(monkeypatch, encode_s, long_s, slow):
    """The fake's samples promise 64 ms for an image."""
    monkeypatch.setattr("epdd.dispatch.routing.time_models.SLOW_AFTER_S", long_s)
    async with running(encoders=1, encode_s=encode_s) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        assert not fleet.encoding.slow(worker)
        await fleet.ask(request("r", *(b"%d" % i for i in range(5))))
        assert fleet.encoding.slow(worker) is slow
        fleet.supervisor.restart("encoder/0")
        while worker.ready is not None:
            await asyncio.sleep(0.01)
        await fleet.ready()
        assert not fleet.encoding.slow(worker)      # a new process, a new model


@pytest.mark.parametrize("policy", ["earliest", "least-loaded", "round-robin", "gpu-only", "budget"])
async def test_a_switch_under_load_loses_nothing(policy):
    async with running(encoders=2, encode_s=0.01) as fleet:
        asks = [asyncio.create_task(fleet.ask(request(f"r{i}", b"%d" % i, b"%d!" % i))) for i in range(12)]
        router = fleet.encoding.router
        while not router.queue or fleet.supervisor.find("encoder/0").in_flight == 0:
            await asyncio.sleep(0)
        images, handed_over = len(router.queue), sum(router.replicas.in_flight.values()) / 64
        fleet.encoding.configure(RouterSettings(policy, "image", 6.0))
        assert router.waiting + sum(router.replicas.in_flight.values()) == images + handed_over
        assert (router.ratio(), fleet.encoding.settings) == (6.0, RouterSettings(policy, "image", 6.0))
        assert await asyncio.gather(*asks) == [[expected(b"%d" % i, b"%d!" % i)] for i in range(12)]
        await fleet.at_rest()
        reasons = {each["hand_overs"][0]["reason"] for name in ("r0", "r11")
                   for each in fleet.history.explain(name)["images"]}
        assert len(reasons) > 1 or policy == "earliest"     # as before
