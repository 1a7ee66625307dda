"""Clients that send nothing, too slowly or too little are closed, and no others."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from epdd.frontend.http import descriptors
from epdd.frontend.http.body import SLOW, Bodies

from tests.frontend.bench import Bench, hosted, settle

BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
GET = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"


class Client:
    """A client connection with raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def come(cls, bench: Bench, data: bytes = b"") -> Client:
        client = cls(*await asyncio.open_connection("127.0.0.1", int(bench.url.rpartition(":")[2])))
        client.writer.write(data)
        return client

    async def answer(self) -> bytes:
        """One answer, whole."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n")
                      if line.startswith(b"content-length"))
        return head + await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        """All bytes up to the close; a reset, which follows unread bytes, must not lose them."""
        told = b""
        try:
            while more := await self.reader.read(1 << 16):
                told += more
        except ConnectionError:
            pass
        return told


def code(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


@hosted(server={"body_timeout_s": 5})      # in which all of them connect, on a busy machine too
async def test_a_body_that_stops(bench: Bench) -> None:
    """It gets a 408, and meanwhile it does not count as a request."""
    stopped = [await Client.come(bench, POST % 5000 + b"{") for _ in range(20)]
    chunked = await Client.come(bench, POST.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")
                                + b"5\r\n{")
    await settle(lambda: bench.context.stats.running == 21)
    assert bench.door.in_flight == 0 and (await bench.chat()).status == 200
    for client in (*stopped, chunked):
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 408") and code(answer) == "request_timeout"
        assert b"connection: close" in answer.lower()
    assert bench.context.stats.gauges["bodies"]() == 0 and bench.context.stats.counts["rejected"] == 21
    assert bench.context.stats.counts["accepted"] == 1


@hosted(server={"body_timeout_s": 0.3})
async def test_a_body_that_trickles(bench: Bench) -> None:
    """Single bytes are too slow; at 512 bytes a second a body may take any time."""
    slow = await Client.come(bench, POST % 5000)
    answer = asyncio.create_task(slow.rest())
    while not answer.done():
        slow.writer.write(b" ")
        await asyncio.sleep(0.05)
    assert (await answer).startswith(b"HTTP/1.1 408")
    steady = await Client.come(bench, POST % 5000)
    for _ in range(20):
        steady.writer.write(b" " * 200)         # 4,000 bytes in a second
        await asyncio.sleep(0.05)
    steady.writer.write(BODY + b" " * (1000 - len(BODY)))
    assert (await steady.answer()).startswith(b"HTTP/1.1 200")


@hosted(server={"max_body_bytes": 3000, "body_timeout_s": 0}, media={"max_inflight_bytes": 5000})
async def test_the_slow_give_way_to_who_has_a_body(bench: Bench) -> None:
    slow = [await Client.come(bench, POST % 2900 + b" " * 2000) for _ in range(2)]
    await settle(lambda: bench.context.stats.gauges["bodies"]() == 4000)
    await asyncio.sleep(1.1)                    # until their speed is known
    whole = await Client.come(bench, POST % 2900 + BODY + b" " * (2900 - len(BODY)))
    assert (await whole.answer()).startswith(b"HTTP/1.1 200")
    done, left = await asyncio.wait([asyncio.create_task(client.rest()) for client in slow],
                                    return_when=asyncio.FIRST_COMPLETED)
    assert len(left) == 1 and code(done.pop().result()) == "overloaded"
    for task in left:
        task.cancel()


def test_fast_bodies_do_not_give_way() -> None:
    async def main() -> None:
        from epdd.frontend.http.body import _BodyBytes
        bodies = Bodies(100 * SLOW, 100 * SLOW, 10)
        now = [100.0]
        fast, slow = _BodyBytes(bodies, 10), _BodyBytes(bodies, 10)
        for counted, size in ((fast, 4 * SLOW), (slow, SLOW)):
            counted._clock = lambda: now[0]
            counted._looked = 100.0
            bodies._reading.add(counted)
            counted.deadline = asyncio.timeout(None)
            await counted.deadline.__aenter__()
            counted.take(size)
        assert not bodies.evict()            # no speed is measured yet
        now[0] += 2
        assert bodies.evict() and slow.evicted and not fast.evicted
        assert bodies.held == 4 * SLOW and not bodies.evict()
        with pytest.raises(asyncio.CancelledError):     # its reader's way out
            await asyncio.sleep(1)

    asyncio.run(main())


@hosted(server={"head_timeout_s": 0.3, "keep_alive_s": 0.6})
async def test_connections_without_a_request(bench: Bench) -> None:
    silent, half, idle = [await Client.come(bench, data) for data in (b"", POST[:30], GET)]
    assert (await idle.answer()).startswith(b"HTTP/1.1 200")
    assert await silent.rest() == b""
    answer = await half.rest()
    assert answer.split()[1] == b"408" and code(answer) == "request_timeout" and b"x-request-id" in answer.lower()
    trickle = await Client.come(bench, b"GET /")
    ended = asyncio.create_task(trickle.rest())
    while not ended.done():         # a byte now and then does not move the deadline
        trickle.writer.write(b"a")
        await asyncio.sleep(0.05)
    assert (await ended).split()[1] == b"408"
    assert await idle.rest() == b""
    closed = bench.context.connections.closed
    assert closed["head"] == 3 and closed["idle"] == 1
    await settle(lambda: len(bench.context.connections) == 0)


@hosted(server={"head_timeout_s": 0.3})
async def test_a_connection_that_works_is_left_alone(bench: Bench) -> None:
    """The deadlines are of heads and of idleness: an answer may take longer than both."""
    bench.script.play = bench.script.say("hello world", step_s=0.2)
    client = await Client.come(bench, POST % len(BODY) + BODY)
    assert (await client.answer()).startswith(b"HTTP/1.1 200")
    client.writer.write(GET)
    assert (await client.answer()).startswith(b"HTTP/1.1 200")


@hosted(server={"max_connections": 8})
async def test_over_the_limit_who_asks_nothing_gives_way(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello", hang=True)
    busy = [await Client.come(bench, POST % len(BODY) + BODY) for _ in range(3)]
    await settle(lambda: bench.door.in_flight == 3)
    idle = await Client.come(bench, GET)
    await idle.answer()
    silent = [await Client.come(bench) for _ in range(4)]
    await settle(lambda: len(bench.context.connections) == 8)
    await asyncio.sleep(1.1)                    # until they are not expected to ask
    silent += [await Client.come(bench) for _ in range(3)]
    for client in silent[:3]:
        assert await client.rest() == b""       # the oldest
    last = await Client.come(bench, GET)
    assert (await last.answer()).startswith(b"HTTP/1.1 200")
    idle.writer.write(GET)                      # those that have asked before stay longer
    assert (await idle.answer()).startswith(b"HTTP/1.1 200")
    assert bench.door.in_flight == 3 and len(bench.context.connections) <= 8
    more = [await Client.come(bench, POST % len(BODY) + BODY) for _ in range(5)]
    await settle(lambda: bench.door.in_flight == 8)    # new connections do not evict each other
    answer = await (await Client.come(bench)).rest()
    assert answer.startswith(b"HTTP/1.1 503") and code(answer) == "connections_full"
    assert bench.context.connections.closed["refused"] == 1
    for client in busy + more:
        client.writer.close()
    await settle(lambda: bench.door.in_flight == 0)


class Newcomer:
    """A new connection, as Connections sees it."""

    def expire(self, reason: str) -> None:
        raise AssertionError(reason)

    def drop(self) -> None:
        raise AssertionError("dropped")

    def has_unread(self) -> bool:
        return False


@hosted(server={"max_connections": 4})
async def test_who_has_sent_a_request_does_not_give_way(bench: Bench) -> None:
    """Its bytes may wait in the kernel while the loop is busy."""
    book = bench.context.connections
    kept, fresh = await Client.come(bench, GET), await Client.come(bench)
    await kept.answer()
    idle = await Client.come(bench, GET)
    await idle.answer()
    silent = await Client.come(bench)
    await settle(lambda: len(book) == 4)
    for client in (kept, fresh):
        os.write(client.writer.get_extra_info("socket").fileno(), GET)      # at once, not by the loop
    newcomers = Newcomer(), Newcomer()
    assert [book.opened(newcomer) for newcomer in newcomers] == [True, True]
    for client in (silent, idle):
        assert await client.rest() == b""
    for client in (kept, fresh):
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
    for newcomer in newcomers:
        book.ended(newcomer)


@hosted(server={"max_connections": 4})
async def test_who_was_just_answered_stays_before_who_has_asked_nothing(bench: Bench) -> None:
    book = bench.context.connections
    silent = [await Client.come(bench) for _ in range(2)]
    await settle(lambda: len(book) == 2)
    await asyncio.sleep(0.4)                    # longer than a request takes to follow its connection
    answered = [await Client.come(bench, GET) for _ in range(2)]
    for client in answered:
        await client.answer()
    newcomers = Newcomer(), Newcomer()
    assert [book.opened(newcomer) for newcomer in newcomers] == [True, True]
    for client in silent:
        assert await client.rest() == b""
    for client in answered:
        client.writer.write(GET)
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
    for newcomer in newcomers:
        book.ended(newcomer)


def test_the_limit_of_descriptors(monkeypatch: Any) -> None:
    limits = [1024, 1 << 30]
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda what: tuple(limits))
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda what, new: limits.__setitem__(slice(None), new))
    assert descriptors.for_connections() == 512
    descriptors.raise_limit()
    assert limits == [1 << 20, 1 << 30] and descriptors.for_connections() == (1 << 20) - 512
    limits[:] = 256, 256
    descriptors.raise_limit()
    assert limits == [256, 256] and descriptors.for_connections() == 128


@hosted()
async def test_half_closed(bench: Bench) -> None:
    """A GET is answered; a POST ends with a 400."""
    async def half(data: bytes) -> bytes:
        client = await Client.come(bench, data)
        client.writer.write_eof()
        return await client.rest()

    assert (await half(GET)).startswith(b"HTTP/1.1 200")
    assert (await half(GET * 3)).count(b"HTTP/1.1 200") == 3
    assert (await half(b"nonsense\r\n\r\n")).startswith(b"HTTP/1.0 400")
    assert await half(b"") == await half(POST[:20]) == b""
    bench.script.play = bench.script.say("hello", hang=True)
    for data in (POST % len(BODY) + BODY, POST % 5000 + b"{", GET + POST % len(BODY) + BODY):
        answer = await half(data)
        assert code(answer[answer.rindex(b"HTTP/1.1"):]) == "client_left"
    client = await Client.come(bench, POST % len(BODY) + BODY)
    await settle(lambda: bench.door.in_flight == 1)
    client.writer.write_eof()
    assert code(await client.rest()) == "client_left"
    await settle(lambda: bench.door.in_flight == 0 and bench.context.stats.running == 0)


@hosted(server={"timeout_s": 1})
async def test_pages_that_are_not_read(bench: Bench) -> None:
    """A client that asks for many pages and reads none is closed."""
    client = await Client.come(bench)
    client.writer.transport.pause_reading()
    client.writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)
    await settle(lambda: bench.context.connections.closed["stalled"] == 1, 60)
    await settle(lambda: len(bench.context.connections) == 0)
    client.writer.transport.abort()
