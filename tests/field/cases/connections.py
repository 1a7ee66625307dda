"""D41 to D43: clients that leave, workers that go, bodies of every size."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

from tests.field.cases import pictures
from tests.field.bench import CHAT, Bench, asking, little_memory
from tests.field.table import case

COLOUR = "What colour is the circle?"
LONG = {"max_tokens": 6000, "ignore_eos": True}     # seconds of decoding, if nobody stopped it
MIB = 1 << 20


async def leave(bench: Bench, there: Any, body: dict[str, Any]) -> None:
    """A client that asks, and leaves once `there(status)` is true."""
    task = asyncio.create_task(bench.post(body))
    await bench.until(there, 10)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


async def empty(bench: Bench) -> None:
    """Whether nothing is left of the request; the neighbour's stream may run."""
    await bench.until(lambda status: status["requests"]["running"] <= 1 and status["router"]["queue_jobs"] == 0
                      and status["arena"]["pinned_bytes"] == 0, 5)


@case("D41", "client leaves",
      "queued, fetching, encoding, embedded and waiting, prefilling, decoding; streaming or not",
      "the work ends at once, everything is free", kills=("pd/0",))
async def leaving(bench: Bench) -> None:
    sizes = iter(range(200, 300))

    def body(**fields: Any) -> dict[str, Any]:
        return asking(pictures.circle("red", next(sizes)), COLOUR, **LONG, **fields)

    for stream in (False, True):
        async with bench.frozen("encoder/0", "encoder/1"):
            await leave(bench, lambda status: any(
                w["in_flight"] for w in status["workers"] if w["role"] == "encoder"), body(stream=stream))
            # Late encoders get no further image.
            crowd = [asyncio.create_task(bench.post(body(stream=stream)))]
            while not bench.status()["router"]["queue_jobs"]:
                crowd.append(asyncio.create_task(bench.post(body(stream=stream))))
                await asyncio.sleep(0.02)
            for task in crowd:
                task.cancel()
            await asyncio.wait(crowd)
        await empty(bench)
        fetching = asking(pictures.part(bench.host.url + "/hang"), COLOUR, stream=stream)
        await leave(bench, lambda status: bench.host.hanging, fetching)
        await empty(bench)
        pid = bench.kill("pd/0")        # until it is back, encoded images wait for it
        await bench.until(lambda status: status["workers"][-1]["pid"] != pid, 5)
        done = sum(w["done"] for w in bench.status()["workers"] if w["role"] == "encoder")
        await leave(bench, lambda status: sum(
            w["done"] for w in status["workers"] if w["role"] == "encoder") > done, body(stream=stream))
        await bench.ready()
        await empty(bench)
        async with bench.frozen("pd/0"):
            held = bench.worker("pd/0")["in_flight"]
            await leave(bench, lambda status: next(
                w for w in status["workers"] if w["name"] == "pd/0")["in_flight"] > held, body(stream=stream))
        await empty(bench)
    async with bench.stream("Hello") as answer:
        for _ in range(5):
            await answer.content.readline()
    await empty(bench)
    not_streamed = asking("Hello", **LONG)
    await leave(bench, lambda status: next(
        w for w in status["workers"] if w["name"] == "pd/0")["in_flight"], not_streamed)
    await empty(bench)


@case("D42", "failure after the first token", "the PD worker is killed after five tokens; and before the first",
      "an error event, [DONE], no finish_reason; before the first token: retried, 400 the second time",
      policy="before the first token it is retried once", kills=("pd/0",))
async def broken_stream(bench: Bench) -> None:
    async with bench.stream("Hello") as answer:
        lines = [await answer.content.readline() for _ in range(12)]
        bench.kill("pd/0")
        text = (b"".join(lines) + await answer.content.read()).decode()
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    frames = [json.loads(event) for event in events[:-1]]
    assert frames[-1]["error"]["code"] == "worker_lost" and frames[-1]["error"]["type"] == "server_error"
    assert all(not choice["finish_reason"] for frame in frames[:-1] for choice in frame["choices"])
    await bench.ready()

    async with bench.frozen("pd/0"):
        asked = asyncio.create_task(bench.ask("Hello", stream=True))
        await bench.until(lambda status: status["workers"][-1]["in_flight"])
        pid = bench.kill("pd/0")
    assert (await asked).said.startswith("Hello!") and bench.worker("pd/0")["pid"] != pid

    prompt = " ".join(str(random.Random(42 + i).random()) for i in range(150))
    async with bench.frozen("pd/0"):
        asked = asyncio.create_task(bench.ask(prompt, stream=True))
        await bench.until(lambda status: status["workers"][-1]["in_flight"])
        pid = bench.kill("pd/0")
    # The next one reads the prompt for some tenths of a second.
    await bench.until(lambda status: status["workers"][-1]["pid"] not in (pid, None)
                      and status["workers"][-1]["in_flight"])
    bench.kill("pd/0")
    reply = await asked
    # Two workers in a row: the prompt may be the cause.
    assert (reply.status, reply.error["code"]) == (400, "prompt_rejected"), reply.text


@case("D43", "bodies of every size", "3 MB in chunks; 200 MB with and without a length; JSON 100,000 deep",
      "200; 413 as soon as the size is known, memory within the limit; 400", daemon="small")
async def bodies(bench: Bench) -> None:
    limit = 8 * MIB
    noise = await asyncio.to_thread(pictures.noise, 64, 64)
    image = await asyncio.to_thread(lambda: pictures.circle("blue", 64) + noise * 180)     # behind its end: ignored
    body = json.dumps(asking(image, COLOUR)).encode()
    assert 2.5e6 < len(body) < limit

    async def pieces(data: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(data), 1 << 16):
            yield data[at:at + (1 << 16)]

    reply = await bench.post(b"", data=pieces(body))
    assert reply.said == "blue"
    with little_memory(bench, limit + 16 * MIB):
        for header in ("Transfer-Encoding: chunked", f"Content-Length: {200 * MIB}"):
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.daemon.port)
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
            sent = 0
            answer = asyncio.create_task(reader.readline())
            piece = b" " * 65536
            try:
                while not answer.done() and sent < 200 * MIB:
                    writer.write(piece if "Length" in header else b"10000\r\n" + piece + b"\r\n")
                    await writer.drain()
                    sent += len(piece)
            except ConnectionError:
                pass
            # The kernel decides how much the two sockets hold meanwhile.
            assert (await answer).split()[1] == b"413" and sent < 100 * MIB
            writer.close()
    for deep in (b"[" * 100_000, b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a":' * 100_000):
        assert (await bench.post(deep)).status == 400


@case("D46", "half requests", "20 times silent, half a head, half a body, single bytes",
      "closed, 408, 408; others are served meanwhile; nothing counts against server.max_requests",
      policy="silent connections are closed; those with half a request get a 408", daemon="impatient")
async def half_requests(bench: Bench) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n".encode()

    async def says(data: bytes, more: bytes = b"") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.daemon.port)
        writer.write(data)
        ended = asyncio.create_task(reader.readline())
        while not ended.done():
            writer.write(more)
            await asyncio.wait([ended], timeout=0.1)
        writer.close()
        return ended.result()

    half = {data: [asyncio.create_task(says(data, more)) for _ in range(20)] for data, more in (
        (b"", b""), (head, b""), (head + b"\r\n{", b""), (head + b"\r\n[", b" "))}
    assert (await bench.ask("Hello")).status == 200
    for data, status in zip(half, (b"", b"408", b"408", b"408")):
        for answer in await asyncio.gather(*half[data]):
            assert status in answer and bool(status) == bool(answer), (data, answer)


@case("D47", "a client closes its sending side", "shutdown(SHUT_WR) after GET /ping; after a POST",
      "200; 400 client_left, and the work ends",
      policy="a half-closed connection looks as if its client had left, so a POST ends with it")
async def half_closed(bench: Bench) -> None:
    body = json.dumps(asking("Hello", **LONG)).encode()
    get = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    post = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    for data, status, word in ((get, b"200", b"ok"), (post, b"400", b"client_left")):
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.daemon.port)
        writer.write(data)
        writer.write_eof()
        answer = await reader.read()
        assert answer.split()[1] == status and word in answer
        writer.close()
    await empty(bench)
