"""A running daemon with the calls that cases make on it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.e2e.daemon import Daemon
from tests.field.cases import pictures
from tests.field.web import Host

CHAT = "/v1/chat/completions"
SETTLE_S = 60.0         # a hang: on an idle machine everything is back in less than a second
GAP_S = 2.0             # longest pause of an unrelated stream
ANSWER_BYTES_MAX = LOG_BYTES_MAX = 4096
LEAKS = re.compile(r"Traceback|\.py\b|site-packages|/(?:usr|home|tmp|root|proc|opt)/|0x[0-9a-f]{6,}|127\.0\.0\.1"
                   r"|::1|localhost|[A-Za-z0-9+/]{200}")
BASE64 = re.compile(r"[A-Za-z0-9+/]{200}")
FAR = 0.05              # least distance between views of different pictures; rounding stays below a hundredth of it
NEAR = 0.005


@dataclass(frozen=True)
class Reply:
    """An answer as received."""

    status: int
    headers: dict[str, str]
    text: str
    seconds: float
    id: str = ""        # the x-request-id

    @property
    def body(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        return self.body["error"]

    @property
    def events(self) -> list[Any]:
        """Of a stream, without its [DONE]."""
        return [json.loads(line[6:]) for line in self.text.splitlines() if line.startswith("data: {")]

    @property
    def said(self) -> str:
        """The first choice's text, from a stream or not."""
        assert self.status == 200, self.text
        if not self.text.startswith("data:"):
            return self.body["choices"][0]["message"]["content"]
        return "".join(choice["delta"].get("content") or "" for event in self.events
                       for choice in event.get("choices", []) if choice["index"] == 0)

    @property
    def texts(self) -> list[str]:
        """Of every choice of a stream."""
        texts: dict[int, str] = {}
        for event in self.events:
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
        return [texts[index] for index in sorted(texts)]

    @property
    def finish(self) -> str | None:
        """Why the first choice ended."""
        events = self.events if self.text.startswith("data:") else [self.body]
        return next((choice["finish_reason"] for event in events for choice in event.get("choices", [])
                     if choice["index"] == 0 and choice["finish_reason"]), None)


def content(*parts: Any) -> list[Any]:
    """Parts of a message: text, an image file's bytes, or a ready part."""
    return [{"type": "text", "text": part} if isinstance(part, str) else
            pictures.part(part) if isinstance(part, bytes) else part for part in parts]


def asking(*parts: Any, **fields: Any) -> dict[str, Any]:
    """The body of a request with one user message."""
    return {"messages": [{"role": "user", "content": content(*parts)}], "temperature": 0, "max_tokens": 24, **fields}


class Bench:
    """The daemon, its image sources by http: and file:, and all error answers of the case."""

    def __init__(self, daemon: Daemon, host: Host, folder: Path, http: aiohttp.ClientSession) -> None:
        self.daemon, self.host, self.folder, self.http = daemon, host, folder, http
        self.errors: list[Reply] = []
        self.ready_s: float | None = None       # seconds from a fault to READY, if the case measures it

    # --- asking

    async def post(self, body: Any, path: str = CHAT, **options: Any) -> Reply:
        """`body` is JSON, or bytes sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        options.setdefault("headers", {})
        options["headers"] = {"Content-Type": "application/json"} | options["headers"]
        start = time.monotonic()
        async with self.http.post(self.daemon.url(path), data=options.pop("data", data), **options) as answer:
            text = await answer.text()
        reply = Reply(answer.status, dict(answer.headers), text, time.monotonic() - start,
                      answer.headers.get("x-request-id", ""))
        if reply.status >= 400:
            self.errors.append(reply)
        return reply

    async def ask(self, *parts: Any, **fields: Any) -> Reply:
        return await self.post(asking(*parts, **fields))

    async def get(self, path: str) -> Reply:
        start = time.monotonic()
        async with self.http.get(self.daemon.url(path)) as answer:
            return Reply(answer.status, dict(answer.headers), await answer.text(), time.monotonic() - start)

    async def answers(self, *parts: Any, **fields: Any) -> str:
        """The answer's text; the request must succeed."""
        return (await self.ask(*parts, **fields)).said

    async def refused(self, code: str | None, *parts: Any, status: int = 400, **fields: Any) -> Reply:
        """The request must be refused with this code; streams too, before their header."""
        for stream in (False, True):
            reply = await self.ask(*parts, stream=stream, **fields)
            assert reply.status == status, reply.text
            assert code is None or reply.error["code"] == code, reply.text
            fields.pop("stream_options", None)
        return reply

    async def view(self, *images: Any, question: str = "Describe the image.") -> tuple[int, dict[str, float]]:
        """The model's view of images: prompt tokens, and the log-probabilities of the answer's first token."""
        reply = await self.ask(*images, question, max_tokens=1, logprobs=True, top_logprobs=20)
        assert reply.status == 200, reply.text
        first = reply.body["choices"][0]["logprobs"]["content"][0]
        return (reply.body["usage"]["prompt_tokens"],
                {str(entry["bytes"]): entry["logprob"] for entry in first["top_logprobs"]})

    async def same_view(self, *pairs: tuple[Any, Any]) -> None:
        """Both of each pair must give the encoder the same pixels."""
        for one, other in pairs:
            tokens, seen = await self.view(one)
            tokens_too, seen_too = await self.view(other)
            assert tokens == tokens_too and distance(seen, seen_too) < NEAR, distance(seen, seen_too)

    async def other_view(self, one: Any, other: Any) -> None:
        """Both must look different, so that the case's fault would show."""
        assert distance((await self.view(one))[1], (await self.view(other))[1]) > FAR

    @asynccontextmanager
    async def stream(self, *parts: Any, **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """A stream; the client leaves at the block's end."""
        body = asking(*parts, **{"stream": True, "ignore_eos": True, "max_tokens": 6000} | fields)
        async with self.http.post(self.daemon.url(CHAT), json=body) as answer:
            yield answer

    # --- looking

    def status(self) -> dict[str, Any]:
        return self.daemon.status()

    def worker(self, name: str) -> dict[str, Any]:
        return self.daemon.worker(name)

    async def until(self, true: Callable[[dict[str, Any]], Any], seconds: float = 30.0) -> dict[str, Any]:
        """Until `true(status)`; returns that status."""
        end = time.monotonic() + seconds
        while not true(status := self.status()):
            assert time.monotonic() < end, status
            await asyncio.sleep(0.01)
        return status

    async def ready(self) -> None:
        await self.until(lambda status: status["state"] == "ready")

    @asynccontextmanager
    async def healing(self) -> AsyncIterator[None]:
        """Around a fault and its effects; waits until all workers are READY again."""
        began = time.monotonic()
        yield
        await self.ready()
        self.ready_s = time.monotonic() - began

    @asynccontextmanager
    async def frozen(self, *names: str) -> AsyncIterator[None]:
        """Stop these workers with SIGSTOP."""
        pids = [self.worker(name)["pid"] for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGCONT)

    def kill(self, name: str) -> int:
        """SIGKILL; returns the old pid."""
        pid = self.worker(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid


@contextmanager
def little_memory(bench: Bench, most: int) -> Iterator[None]:
    """No process of the daemon's memory may grow by more than `most` bytes, even for a moment."""
    status = bench.status()
    pids = [bench.daemon.process.pid, *(worker["pid"] for worker in status["workers"])]
    before = [psutil.Process(pid).memory_info().rss for pid in pids]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")     # reset the peak
    yield
    for pid, had in zip(pids, before):
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        assert peak is not None and int(peak[1]) * 1024 < had + most, (pid, peak[1], had)


def distance(one: dict[str, float], other: dict[str, float]) -> float:
    """Between two views: the largest difference over tokens in both, or against the least likely of one."""
    least = max(min(one.values()), min(other.values()))
    return max(abs(max(one.get(key, least), least) - max(other.get(key, least), least)) for key in one | other)
