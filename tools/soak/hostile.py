"""Hostile clients of a daemon, in a process of their own, with cheap actions and bounded rates.

    echo '{"port": 8000, "key": "sk-one", "seconds": 30}' | python -m tools.soak.hostile    # a line for each attack

They hold many connections that send nothing, half a head or half a body.  In turn they send files and bodies that must
be refused, wrong keys and noise, and break off uploads and answers.  After each attack the process prints one JSON
object: the count of each action's ends (a status, `closed`, or `held` to the end), and the violations.

Two actions are valid requests: a stream that is broken off after its first event, and a client that never reads.  One
of each runs at a time, without an image, so they take at most two places in a batch of the decoder.
"""

import asyncio
import functools
import itertools
import json
import os
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from tools.soak import bombs

LOOPBACK = "127.0.0.1"
SILENT, HALF_HEADS, HALF_BODIES, TRICKLING = 500, 250, 300, 20      # connections held at once
# At the limit, a new connection replaces the one that has waited longest for its head, so the rate decides how late an
# honest head may be: at this one, more than a second.  A faster one would measure how soon the honest clients' process
# gets a CPU.
RAMP_S = 6.0            # seconds until all are open: 180 connections a second
REOPEN_S = 12.0         # seconds before a closed one connects again; at least half of it
TRICKLE_S = 0.5         # between two bytes
PAUSE_S = 0.5           # seconds between two actions of one kind: at most 2 a second of each
LARGE_PAUSE_S = 2.0     # the same for actions of many megabytes
ANSWER_S = 100.0
UNREAD_S = 3.0          # seconds that a client does not read before it leaves
STATUSES_OF_OURS = ("500", "502", "504")
NICE = 10

REFUSED = ("400", "401", "404", "405", "408", "411", "413", "414", "415", "417", "422", "429", "431", "501", "503",
           "505", "closed")


@dataclass
class Hostiles:
    """All hostile clients, and their results."""

    port: int
    key: str
    seen: dict[str, Counter[str]] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    turns: list[asyncio.Event] = field(default_factory=list)     # of each repeated action, set after its first end

    def note(self, act: str, end: str, refused: bool) -> None:
        """Count an action's end; `refused`: it had to be refused."""
        self.seen.setdefault(act, Counter())[end] += 1
        if end in STATUSES_OF_OURS or refused and end not in REFUSED:
            self.complaints.append(f"{act}: {end}")

    def head(self, path: str, length: int, key: str | None = None) -> bytes:
        return (f"POST {path} HTTP/1.1\r\nHost: {LOOPBACK}\r\nAuthorization: Bearer {key or self.key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n").encode()

    async def connect(self, receive_bytes: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError."""
        client = socket.socket()
        client.setblocking(False)
        if receive_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(client, (LOOPBACK, self.port))
        except BaseException:
            client.close()
            raise
        return await asyncio.open_connection(sock=client, limit=1 << 12)

    # --- connections that are held

    async def hold(self, act: str, number: int, count: int, first: bytes, more: bytes = b"") -> None:
        """Open a connection, send `first` and then `more` byte by byte, and wait for its end; then again."""
        await asyncio.sleep(RAMP_S * number / count)
        while True:
            end = "closed"
            with suppress(OSError):
                reader, writer = await self.connect()
                try:
                    writer.write(first)
                    trickling = asyncio.create_task(_trickle(writer, more)) if more else None
                    try:
                        end = await _status(reader)
                    except asyncio.CancelledError:
                        self.note(act, "held", refused=False)
                        raise
                    finally:
                        if trickling:
                            trickling.cancel()
                finally:
                    writer.transport.abort()
            self.note(act, end, refused=True)
            await asyncio.sleep(REOPEN_S * random.uniform(0.5, 1.0))

    # --- acts in turn

    def repeat(self, pause_s: float, act: Callable[[], Awaitable[None]]) -> Awaitable[None]:
        self.turns.append(once := asyncio.Event())
        return self._repeat(pause_s, act, once)

    async def _repeat(self, pause_s: float, act: Callable[[], Awaitable[None]], once: asyncio.Event) -> None:
        while True:
            with suppress(OSError):
                await act()
            once.set()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def send(self, act: str, what: bytes) -> None:
        """Send it whole and return how it is refused."""
        reader, writer = await self.connect()
        try:
            writer.write(what)
            async with asyncio.timeout(ANSWER_S):
                self.note(act, await _status(reader), refused=True)
        except TimeoutError:
            self.complaints.append(f"{act}: no answer in {ANSWER_S:.0f} s")
        finally:
            writer.transport.abort()

    async def break_off_upload(self, body: bytes) -> None:
        """A reset in the middle of a body."""
        _, writer = await self.connect()
        writer.write(self.head("/v1/chat/completions", len(body)) + body[:random.randrange(len(body) // 2)])
        await asyncio.sleep(random.random() * 0.2)
        _reset(writer)
        self.note("broken-off upload", "left", refused=False)

    async def break_off_stream(self) -> None:
        """A reset in the middle of an answer."""
        body = bombs.chat("Hello", stream=True, max_tokens=64, ignore_eos=True)
        reader, writer = await self.connect()
        try:
            writer.write(self.head("/v1/chat/completions", len(body)) + body)
            async with asyncio.timeout(ANSWER_S):
                self.note("broken-off stream", await _status(reader), refused=False)
                await reader.read(100)
        finally:
            _reset(writer)

    async def never_read(self) -> None:
        """Request an answer longer than all buffers, and do not read it."""
        body = bombs.chat("Hello", stream=True, max_tokens=400, ignore_eos=True, logprobs=True, top_logprobs=20)
        _, writer = await self.connect(receive_bytes=1 << 12)
        writer.transport.pause_reading()        # type: ignore[attr-defined]
        writer.write(self.head("/v1/chat/completions", len(body)) + body)
        await asyncio.sleep(UNREAD_S)
        _reset(writer)
        self.note("reader that never reads", "left", refused=False)

    def all(self) -> list[Awaitable[None]]:
        """All concurrent attacks."""
        images, texts = _images(), _texts()
        images_in_turn, texts_in_turn = _in_turn(_images), _in_turn(_texts)
        path, noise = "/v1/chat/completions", random.Random(1)
        half_head = self.head(path, 10)[:-2]
        one_byte = self.head(path, 5000) + b"{"
        holds = [("silent connection", SILENT, b"", b""), ("half a head", HALF_HEADS, half_head, b""),
                 ("stopped body", HALF_BODIES, one_byte, b""),
                 ("trickling head", TRICKLING, half_head, b"X-Slow: " + b"z" * 10_000),
                 ("trickling body", TRICKLING, one_byte, b" " * 10_000)]
        found: list[Awaitable[None]] = [self.hold(act, number, count, first, more)
                                        for act, count, first, more in holds for number in range(count)]

        async def image() -> None:
            name = next(images_in_turn)
            await self.send(name, self.head(path, len(images[name])) + images[name])

        async def text() -> None:
            name = next(texts_in_turn)
            await self.send(name, self.head(path, len(texts[name])) + texts[name])

        async def wrong_key() -> None:
            body = bombs.chat("Hello")
            key = random.choice([self.key[:-1], self.key + "x", self.key.upper(), "x" * 5000])
            await self.send("wrong key", self.head(path, len(body), key) + body)

        async def raw() -> None:
            await self.send("noise", random.choice([
                noise.randbytes(500) + b"\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise.randbytes(
                    512) + b"\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
                b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n"]))

        async def upload() -> None:
            await self.break_off_upload(random.choice(list(images.values())))

        return found + [self.repeat(PAUSE_S, act) for act in (
            image, wrong_key, raw, upload, self.break_off_stream, self.never_read)] + [self.repeat(LARGE_PAUSE_S, text)]


_images = functools.cache(bombs.image_bodies)
_texts = functools.cache(bombs.json_bodies)


@functools.cache
def _in_turn(bodies: Callable[[], dict[str, bytes]]) -> Iterator[str]:
    """Their names, cyclically; an attack continues after the last one's."""
    return itertools.cycle(bodies())


async def _status(reader: asyncio.StreamReader) -> str:
    """Of an answer; `closed` if there is none."""
    with suppress(OSError, ValueError):
        line = (await reader.readline()).split(b" ", 2)
        if len(line) > 1 and line[0].startswith(b"HTTP/"):
            return line[1][:3].decode("ascii", "replace")
    return "closed"


async def _trickle(writer: asyncio.StreamWriter, what: bytes) -> None:
    with suppress(OSError):
        for at in range(len(what)):
            writer.write(what[at:at + 1])
            await asyncio.sleep(TRICKLE_S)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def attack(port: int, key: str, seconds: float) -> dict[str, object]:
    """Run all attacks for this time, and until each action has been tried once; returns the counts."""
    hostiles = Hostiles(port, key)
    tasks = [asyncio.ensure_future(each) for each in hostiles.all()]
    await asyncio.sleep(seconds)
    for turn in hostiles.turns:
        await turn.wait()
    for task in tasks:
        task.cancel()
    for left in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(left, asyncio.CancelledError):
            hostiles.complaints.append(f"a hostile client broke: {left!r}")
    return {"seen": hostiles.seen, "complaints": hostiles.complaints}


def main() -> None:
    os.nice(NICE)
    _images(), _texts()
    for line in sys.stdin:
        given = json.loads(line)
        print(json.dumps(asyncio.run(attack(given["port"], given["key"], given["seconds"]))), flush=True)


if __name__ == "__main__":
    main()
