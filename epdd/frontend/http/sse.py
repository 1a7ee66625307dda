"""Server-sent events in the form that all clients of chat streams can read.

One event is one line `data: <json>`, an empty line, and one write.  There are no comments and no `event:`
lines: some clients fail on them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",      # else nginx collects events
}
_ERROR_EVENT_S = 5.0    # for the error event of a broken stream: its client may be stuck


class ClientGone(Exception):
    """The client closed the connection during the stream."""


class EventStream:
    """A streamed answer.  Its header is sent with the first event, so that an earlier failure has its own status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, event: dict[str, Any]) -> None:
        """Waits while the client's connection is full.  Raises ClientGone."""
        await self._write(orjson.dumps(event))

    async def end(self) -> web.StreamResponse:
        await self._write(b"[DONE]")
        return self.response

    async def fail(self, envelope: dict[str, Any]) -> web.StreamResponse:
        """End with an error event: the status is already sent."""
        try:
            async with asyncio.timeout(_ERROR_EVENT_S):
                await self.send(envelope)
                await self.end()
        except (TimeoutError, ClientGone):
            if self._request.transport is not None:
                self._request.transport.abort()
        return self.response

    async def _write(self, data: bytes) -> None:
        try:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(b"data: " + data + b"\n\n")
        except ConnectionError:
            raise ClientGone from None
