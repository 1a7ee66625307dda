"""Embeddings by encoders' GPU memory: real processes, whose "GPU memory" is a memfd that is opened by its handle."""

import asyncio
import signal
import time

from epdd.arena import PAGE
from epdd.dispatch.encoder_cache import transport
from epdd.dispatch.encoder_cache.cache import HOST
from tests.dispatch.fleet import expected, request, running

ONE = {"encoder/0": "cuda:0", "pd/0": "cuda:0"}
POOL = {"encoders": 1, "devices": ONE, "peers": ("cuda:0",), "pool": 16 * PAGE}


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def pools(fleet):
    return {number: space for number, space in fleet.cache.arenas.items() if number != HOST}


async def open_pool(fleet, *pds):
    """Wait until these workers have opened the only pool; returns its number."""
    await until(lambda: pools(fleet) and all(
        fleet.supervisor.find(name).arenas.get(min(pools(fleet))) is not None for name in pds or ["pd/0"]))
    return min(pools(fleet))


async def test_rows_go_by_the_encoders_memory_and_stay_there_for_reuse():
    async with running(**POOL) as fleet:
        number = await open_pool(fleet)
        assert await fleet.ask(request("r1", b"one", b"two")) == [expected(b"one", b"two")]
        await fleet.at_rest()
        assert fleet.cache.host.used_bytes == 0 and pools(fleet)[number].cached_bytes == 2 * PAGE
        assert await fleet.ask(request("r2", b"two")) == [expected(b"two")]
        assert fleet.cache.counts.hits == 1 and fleet.supervisor.find("encoder/0").done == 2
        assert fleet.encoding.transport.pairs() == [
            {"encoder": "encoder/0", "pd": "pd/0", "way": "gpu", "why": None, "pinned": False}]
        assert fleet.encoding.transport.pools() == [
            {"encoder": "encoder/0", "device": "cuda:0", "bytes": 16 * PAGE, "used_bytes": 2 * PAGE,
             "cached_bytes": 2 * PAGE}]


async def test_a_full_pool_lets_what_is_unused_go_and_then_uses_the_host():
    async with running(**POOL | {"pool": 2 * PAGE}) as fleet:
        number = await open_pool(fleet)
        images = [b"one", b"two", b"three"]
        assert await fleet.ask(request("r1", *images)) == [expected(*images)]
        assert (fleet.cache.host.used_bytes, pools(fleet)[number].used_bytes) == (PAGE, 2 * PAGE)
        assert await fleet.ask(request("r2", b"four")) == [expected(b"four")]
        assert fleet.cache.counts.evictions == 1 and pools(fleet)[number].used_bytes == 2 * PAGE
        await fleet.at_rest()


async def test_all_readers_must_have_opened_it():
    async with running(**POOL | {"pds": 2, "devices": ONE | {"pd/1": "cpu"}}) as fleet:
        await open_pool(fleet)
        assert await fleet.ask(request("r1", b"one")) == [expected(b"one")]
        assert fleet.cache.host.used_bytes == PAGE
        await until(lambda: fleet.supervisor.find("encoder/0").arenas)
        pairs = fleet.encoding.transport.pairs()
        assert [(pair["pd"], pair["way"], pair["why"], pair["pinned"]) for pair in pairs] == [
            ("pd/0", "host", "pd/1 cannot read it", True), ("pd/1", "host", "on CPUs", True)]


async def test_who_cannot_open_it_gets_rows_by_the_host():
    async with running(**POOL | {"shut": True}) as fleet:
        await open_pool(fleet)
        assert await fleet.ask(request("r1", b"one")) == [expected(b"one")]
        assert fleet.cache.host.used_bytes == PAGE
        assert fleet.encoding.transport.pairs()[0]["why"] == "no peer access"
    async with running(**POOL | {"peers": ("cuda:1",)}) as fleet:
        await until(lambda: pools(fleet))
        assert await fleet.ask(request("r1", b"one")) == [expected(b"one")]
        assert fleet.encoding.transport.pairs()[0]["why"] == "cuda:0 cannot read cuda:0"


async def test_a_lost_encoder_takes_its_embeddings_along():
    async with running(**POOL) as fleet:
        number = await open_pool(fleet)
        await fleet.ask(request("r1", b"one", b"two"))
        fleet.supervisor.find("encoder/0").process.kill()
        await until(lambda: number not in pools(fleet))
        assert fleet.cache.entries == 0
        again = await open_pool(fleet)
        assert again == number + 1
        assert await fleet.ask(request("r2", b"one")) == [expected(b"one")]
        assert set(fleet.supervisor.find("pd/0").arenas) == {0, again}
        await fleet.at_rest()
        assert pools(fleet)[again].used_bytes == PAGE


async def test_what_was_being_read_when_its_encoder_died_is_encoded_again(tmp_path):
    gate = tmp_path / "gate"
    async with running(**POOL, gate=str(gate)) as fleet:
        number = await open_pool(fleet)
        answers = asyncio.create_task(fleet.ask(request("r1", b"one", b"two", n=2)))
        await until(lambda: fleet.supervisor.find("pd/0").in_flight == 2)
        fleet.supervisor.find("encoder/0").process.kill()
        await until(lambda: number not in pools(fleet))
        gate.touch()
        assert await answers == [expected(b"one", b"two")] * 2
        assert fleet.supervisor.find("encoder/0").done == 4 and fleet.supervisor.find("pd/0").restarts == 0
        await fleet.at_rest()


async def test_what_waits_for_another_image_when_its_encoder_dies_is_encoded_again():
    async with running(**POOL | {"encoders": 2}) as fleet:
        number = await open_pool(fleet)
        on_gpu, on_cpu = (fleet.supervisor.find(f"encoder/{i}") for i in range(2))
        on_cpu.process.signal(signal.SIGSTOP)
        answers = asyncio.create_task(fleet.ask(request("r1", b"one", b"two")))
        await until(lambda: on_gpu.done == 1 and on_cpu.in_flight == 1)
        on_gpu.process.kill()
        await until(lambda: number not in pools(fleet))
        on_cpu.process.signal(signal.SIGCONT)
        assert await answers == [expected(b"one", b"two")]
        assert on_gpu.done + on_cpu.done == 3
        await fleet.at_rest()


async def test_what_was_read_of_a_dying_encoder_is_void(monkeypatch):
    """The daemon learns of the end after the memory is freed: embeddings read meanwhile may be garbage."""
    async with running(**POOL) as fleet:
        await open_pool(fleet)
        asked = []
        monkeypatch.setattr(transport, "leaving", lambda pid: asked.append(pid) or len(asked) == 2)
        assert await fleet.ask(request("r1", b"one")) == [expected(b"one")]
        assert fleet.supervisor.find("encoder/0").done == 2 and fleet.supervisor.find("pd/0").failed == 0
        assert set(asked) == {fleet.supervisor.find("encoder/0").process.pid}
        await fleet.at_rest()


async def test_a_prefill_decode_worker_that_comes_back_opens_it_again():
    async with running(**POOL) as fleet:
        number = await open_pool(fleet)
        await fleet.ask(request("r1", b"one"))
        fleet.supervisor.restart("pd/0")
        assert await fleet.ask(request("r2", b"one")) == [expected(b"one")]
        assert fleet.supervisor.find("encoder/0").done == 1 and list(pools(fleet)) == [number]
        await fleet.at_rest()


async def test_rows_that_nobody_can_read_any_more_are_encoded_again():
    async with running(**POOL | {"pds": 1}) as fleet:
        number = await open_pool(fleet)
        await fleet.ask(request("r1", b"one"))
        fleet.supervisor.find("pd/0").arenas[number] = "no peer access"
        assert await fleet.ask(request("r2", b"one")) == [expected(b"one")]
        assert fleet.cache.host.used_bytes == PAGE and pools(fleet)[number].used_bytes == 0
        await fleet.at_rest()


async def test_a_process_that_begins_to_end_is_seen():
    async with running(**POOL) as fleet:
        process = fleet.supervisor.find("encoder/0").process
        assert not transport.leaving(process.pid)
        pid = process.pid
        process.kill()
        deadline = time.monotonic() + 20
        while not transport.leaving(pid):
            assert time.monotonic() < deadline
        assert transport.leaving(1 << 22)       # above any pid
