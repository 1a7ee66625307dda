"""A web server of images on loopback, with every kind of behaviour."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop
from aiohttp import web

from epdd.errors import MediaError
from epdd.frontend.images.fetch import Fetcher
from epdd.settings.service import MediaSettings as Limits

PNG = b"\x89PNG a picture"


@dataclass
class Host:
    """A web server on loopback that records its requests."""

    port: int
    seen: list[str]
    hanging: int = 0
    left: int = 0
    location: str = ""          # where /to?url= leads

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def hosting() -> AsyncIterator[Host]:
    host = Host(0, [])

    async def answer(request: web.Request) -> web.StreamResponse:
        host.seen.append(request.raw_path)
        path = request.path
        if path.startswith("/status/"):
            return web.Response(status=int(path[8:]), text="<html>no</html>")
        if path == "/to":
            url = host.location if "url" in request.query and not request.query["url"] else request.query.get("url")
            return web.Response(body=PNG) if url is None else web.Response(status=302, headers={"Location": url})
        if path == "/hang":
            host.hanging += 1
            try:
                await asyncio.sleep(30)
            finally:
                host.left += 1
        if path.startswith("/bytes/"):
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(int(path[7:]) // 1000):
                await response.write(bytes(1000))
            return response
        if path == "/drip":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"x")
                await asyncio.sleep(0.02)
        if path == "/packed":
            return web.Response(body=gzip.compress(PNG), headers={"Content-Encoding": "gzip"})
        if path == "/cut":
            response = web.StreamResponse(headers={"Content-Length": "100"})
            await response.prepare(request)
            await response.write(b"x" * 10)
            assert request.transport is not None
            request.transport.close()
            return response
        return web.Response(body=PNG)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host.port = runner.addresses[0][1]
    try:
        yield host
    finally:
        await runner.cleanup()


@asynccontextmanager
async def fetching(**limits: Any) -> AsyncIterator[Fetcher]:
    fetcher = Fetcher(Limits(**limits))
    try:
        yield fetcher
    finally:
        await fetcher.close()


def run(test: Callable[[Host], Awaitable[None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(60), hosting() as host:
            await test(host)

    uvloop.run(go())


async def fault(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(MediaError) as caught:
        await fetcher.fetch(url)
    assert "127.0.0.1" not in caught.value.message and caught.value.status == 400
    return caught.value.code


def listed(host: Host) -> dict[str, Any]:
    return {"fetch": "allowlist", "allow": (f"127.0.0.1:{host.port}", f"localhost:{host.port}")}
