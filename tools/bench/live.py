"""The real daemon over an emulated fleet, under open-loop load: requests do not wait for earlier ones.

Shared by the live benchmarks.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp

from tools import launch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tools.simulate.simulator import Encoder

from epdd.emulated_time import EncoderGroup, Formula

LOOK_S = 0.02               # precision of the time at which a worker was ready
LATE_S = 0.02               # a request sent later than this after its time counts as late

# Prefill and decode of about a millisecond, and embeddings of a few bytes, so that only encoding is measured.
FREE_PD = """
[model]
hidden = 4
planes = 1
dtype = "bfloat16"
patch = 16
merge = 2
min_pixels = 65536
max_pixels = 16777216

[[pd]]
kind = "gpu"
count = 2
prefill_tokens_per_s = 1e9
decode = {a = 0.01}
kv_tokens = 16777216
context_max = 1048576
"""
FREE_PD_SETTINGS = ("pd.max_batched_tokens=1048576", "pd.max_sequences=256")


def profile(fleet: Sequence[Encoder], scale: float) -> str:
    """A profile of these encoders with FREE_PD, as TOML."""
    head = f'name = "bench"\nabout = "made by a benchmark"\nanswers = "rows"\nscale = {scale!r}\n'
    return head + FREE_PD + "".join(_encoder(encoder.group) for encoder in fleet)


def _encoder(group: EncoderGroup) -> str:
    if isinstance(group.seconds, Formula):
        seconds = f"{{a = {group.seconds.a!r}, b = {group.seconds.b!r}, c = {group.seconds.c!r}}}"
    else:
        seconds = json.dumps(group.seconds)
    slow = ", ".join(f"{{after_s = {slow.after_s!r}, factor = {slow.factor!r}}}" for slow in group.slow)
    return (f'\n[[encoder]]\nkind = "{group.kind}"\ncount = 1\nseconds = {seconds}\njitter = {group.jitter!r}\n'
            f"slow = [{slow}]\n")


class Daemon(launch.Daemon):
    """`async with Daemon(profile, settings) as daemon`: ready to serve, and always stopped."""

    def __init__(self, emulated: str, settings: Iterable[str]) -> None:
        """`emulated`: a profile's name, or its text."""
        super().__init__(settings=settings)
        if "\n" in emulated:
            path = self.folder / "profile.toml"
            path.write_text(emulated)
            emulated = str(path)
        self.command += ["--emulate", emulated]
        self.ready_at: dict[str, float] = {}        # worker -> zero of its emulated clock, on this machine's clock

    async def __aenter__(self) -> Daemon:
        self.__enter__()
        try:
            await asyncio.to_thread(self.ready, self._see, LOOK_S)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    def _see(self, status: dict[str, Any]) -> None:
        for worker in status["workers"]:
            if worker["state"] == "READY":
                self.ready_at.setdefault(worker["name"], time.monotonic())

    async def __aexit__(self, *why: Any) -> None:
        await asyncio.to_thread(self.__exit__, *why)


class Answered(NamedTuple):
    """A request's times of sending, first and last chunk, in seconds of this machine's clock."""

    due: float              # when it should have been sent
    sent: float
    first: float
    last: float
    tokens: int


def pictures(sizes: Sequence[tuple[int, int]], rng: random.Random) -> Iterator[bytes]:
    """PNG files of these sizes, about a kilobyte each and all different, so that none is in a cache."""
    for size in sizes:
        unique = PngInfo()
        unique.add_text("number", f"{rng.getrandbits(128):032x}")
        file = io.BytesIO()
        Image.new("1", size).save(file, "PNG", pnginfo=unique)
        yield file.getvalue()


def body(sizes: Sequence[tuple[int, int]], text: str, rng: random.Random, **fields: Any) -> bytes:
    """A streaming chat completion about new pictures of these sizes."""
    urls = (f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in pictures(sizes, rng))
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": text}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "stream": True, **fields}).encode()


async def open_loop(url: str, times: Sequence[float], bodies: Sequence[bytes],
                    began: float | None = None) -> list[Answered]:
    """Send each body at its time after `began`; ends the program if one is refused."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began = began or time.monotonic() + 0.5
        return await asyncio.gather(*(_ask(session, url, data, began + at) for at, data in zip(times, bodies)))


async def _ask(session: aiohttp.ClientSession, url: str, data: bytes, due: float) -> Answered:
    await asyncio.sleep(due - time.monotonic())
    sent = time.monotonic()
    first, tokens = 0.0, 0
    async with session.post(url, data=data, headers={"Content-Type": "application/json"}) as answer:
        if answer.status != 200:
            raise SystemExit(f"refused with {answer.status}: {await answer.text()}")
        async for event in _events(answer):
            first = first or time.monotonic()
            if "error" in event:
                raise SystemExit(f"broken answer: {event['error']}")
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return Answered(due, sent, first, time.monotonic(), tokens)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def late(answers: Sequence[Answered]) -> int:
    """Requests that this program sent late, because the machine was busy."""
    return sum(answer.sent - answer.due > LATE_S for answer in answers)


@asynccontextmanager
async def running(emulated: str, settings: Iterable[str] = ()) -> AsyncIterator[Daemon]:
    """A ready daemon; its workers' warnings about lateness are printed at the end."""
    async with Daemon(emulated, settings) as daemon:
        yield daemon
        slower = [line for line in daemon.log.splitlines() if "slower than its profile" in line]
        if slower:
            print(f"  {slower[-1]}", file=sys.stderr)
