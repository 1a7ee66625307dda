"""A running server on a scripted pipeline, for tests of the API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from msgspec import structs
from tokenizers import Tokenizer

from epdd import families
from epdd.checkpoint import prompt_files
from epdd.dispatch.request import Request
from epdd.errors import EpddError
from epdd.frontend import app
from epdd.frontend.context import AnswerEvent, Context
from epdd.frontend.http.auth import Keys
from epdd.frontend.http.connections import Connections
from epdd.frontend.http.server import Runner
from epdd.ops.metrics import RequestStats
from epdd.ops.status import States
from epdd.settings.config import Config
from epdd.wire import Done, Prefilled, TokenLogprob, Tokens

_TEST_S_MAX = 120


def hosted(**settings: dict[str, Any]) -> Callable[[Callable[[Bench], Awaitable[None]]], Callable[..., None]]:
    """Makes `async def test(bench)` a test against a server with these settings."""

    def wrap(test: Callable[[Bench], Awaitable[None]]) -> Callable[..., None]:
        async def go(family: families.ModelInfo) -> None:
            async with asyncio.timeout(_TEST_S_MAX), serve(family, with_settings(**settings)) as bench:
                await test(bench)

        def run(family: families.ModelInfo) -> None:
            uvloop.run(go(family))

        run.__doc__ = test.__doc__
        return run

    return wrap


class Script:
    """A pipeline that plays `play`, and records its requests and their ends."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.closed = 0             # iterators that were closed before their own end
        self.finished = 0
        self.play: Callable[[Request], AsyncIterator[AnswerEvent]] = self.say("hello")
        self.tokenizer: Tokenizer = None  # type: ignore[assignment]

    async def run(self, request: Request) -> AsyncGenerator[AnswerEvent, None]:
        self.requests.append(replace(request, images=list(request.images)))   # as in the real one
        try:
            async for event in self.play(request):
                yield event
        except (GeneratorExit, asyncio.CancelledError):
            self.closed += 1
            raise
        self.finished += 1

    def say(self, text: str, step_s: float = 0.0, fail: EpddError | None = None, hang: bool = False,
            stop_token: int | None = 1, cached: int = 0) -> Callable[[Request], AsyncIterator[AnswerEvent]]:
        """Every choice sends `text` token by token, then ends, fails or hangs."""

        async def play(request: Request) -> AsyncIterator[AnswerEvent]:
            yield 0, Prefilled(request.id, cached)
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids[:request.sampling.max_tokens]
            for token in ids:
                for choice in range(request.n):
                    await asyncio.sleep(step_s)
                    yield choice, Tokens(request.id, (token,), self._logprobs(request, token))
            if fail is not None:
                raise fail
            if hang:
                await asyncio.Event().wait()
            for choice in range(request.n):
                full = len(ids) == request.sampling.max_tokens
                yield choice, Done(request.id, "length" if full else "stop", None if full else stop_token)

        return play

    @staticmethod
    def _logprobs(request: Request, token: int) -> tuple[TokenLogprob, ...]:
        top = request.sampling.logprobs
        if top < 0:
            return ()
        return (TokenLogprob(-0.5, tuple((token + index, -0.5 - 9e3 * index) for index in range(top))),)


class Door:
    """Admission that admits everything, or raises a given error."""

    def __init__(self) -> None:
        self.refuse: EpddError | None = None
        self.refuse_late: EpddError | None = None
        self.in_flight = 0

    def check_load(self) -> None:
        if self.refuse is not None:
            raise self.refuse

    @contextmanager
    def admit(self) -> Iterator[None]:
        self.check_load()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def check(self, request: Request) -> None:
        if self.refuse_late is not None:
            raise self.refuse_late


def worker(name: str, state: str = "ready") -> dict[str, Any]:
    return {"name": name, "role": name.partition("/")[0], "device": "cpu", "state": state, "in_flight": 1,
            "in_flight_cost": 64, "done": 3, "failed": 0, "restarts": 0, "rss_bytes": 1 << 20, "waiting": 2,
            "share": 0.25 if name.startswith("encoder") else None,
            "slowness": 1.75 if name.startswith("encoder") else None,
            "kv_tokens": 1000 if name.startswith("pd") else None, "kv_used": 250 if name.startswith("pd") else None}


@dataclass
class Bench:
    """A running server and its scripted parts."""

    url: str
    script: Script
    door: Door
    context: Context
    http: aiohttp.ClientSession
    app: web.Application
    routes: list[web.AbstractRoute]
    status: dict[str, Any] = field(default_factory=dict)

    async def chat(self, **fields: Any) -> aiohttp.ClientResponse:
        body = {"messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.http.post(f"{self.url}/v1/chat/completions", json=body)

    async def frames(self, **fields: Any) -> list[Any]:
        """The stream's events; the last is the text [DONE]."""
        answer = await self.chat(stream=True, **fields)
        assert answer.status == 200, await answer.text()
        return events(await answer.text())


def events(text: str) -> list[Any]:
    """Strictly: every event is one `data: ` line and an empty one."""
    assert text.endswith("\n\n") and "\r" not in text
    lines = text[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]] + ["[DONE]"]


def states_of(status: dict[str, Any]) -> States:
    """The states that probes get."""
    return States(status["state"], tuple((worker["name"], worker["role"], worker["state"].lower())
                                         for worker in status["workers"]))


@asynccontextmanager
async def serve(family: families.ModelInfo, config: Config | None = None) -> AsyncIterator[Bench]:
    """The real application on a loopback socket."""
    script, door, stats = Script(), Door(), RequestStats()
    config = config or Config()
    status: dict[str, Any] = {
        "state": "ready", "why": [], "uptime_s": 5.0, "workers": [worker("encoder/0"), worker("pd/0")],
        "router": {"policy": "earliest", "unit": "image", "i_cpu": 7, "i_gpu": 0, "queue_jobs": 4, "queue_cost": 256,
                   "oldest_s": 1.5, "ratio": 6.0, "ratio_set": 6.0, "ratio_measured": None, "budget_cpu": None},
        "arena": {"bytes": 4096, "used_bytes": 1024}, "cache": {"hits": 5, "misses": 2}, "requests": {}}
    context = Context(config=config, family=family, prompts=prompt_files(family), model_name="tiny-vl",
                      created=1_700_000_000, pipeline=script, admission=door, states=lambda: states_of(status),
                      max_model_len=lambda: family.max_model_len, status=lambda: status, stats=stats,
                      keys=Keys(config.server), connections=Connections(config.server))
    script.tokenizer = Tokenizer.from_file(f"{family.folder}/tokenizer.json")
    served = app.build(context)
    runner = Runner(served, stats, context.connections, shutdown_timeout_s=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as http:
            yield Bench(f"http://127.0.0.1:{port}", script, door, context, http,
                        served, list(served.router.routes()), status)
    finally:
        await runner.cleanup()


def with_settings(**sections: dict[str, Any]) -> Config:
    """The default settings with some changed: with_settings(server={"timeout_s": 1})."""
    config = Config()
    return structs.replace(config, **{name: structs.replace(getattr(config, name), **values)
                                      for name, values in sections.items()})


async def settle(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def texts(frames: Sequence[Any], index: int = 0) -> str:
    """A stream's whole text for one choice."""
    return "".join(choice["delta"].get("content") or "" for frame in frames if frame != "[DONE]"
                   for choice in frame.get("choices", []) if choice["index"] == index)
