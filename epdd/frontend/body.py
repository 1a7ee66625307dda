"""Request bodies: read within limits of their own, and held no longer than they are needed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from aiohttp import web

from epdd.errors import BadRequest, Overloaded, TooLarge
from epdd.frontend import faults


class Bodies:
    """Bounds each body, and all that are in memory at once."""

    def __init__(self, each_bytes_max: int, all_bytes_max: int) -> None:
        self._each = each_bytes_max
        self.all_bytes_max = max(each_bytes_max, all_bytes_max)
        self.held = 0       # bytes
        self._turn = asyncio.Lock()

    async def read(self, http: web.Request, stack: AsyncExitStack) -> bytearray:
        """The body, counted as held until `stack` closes.

        Not by `http.read()`, which keeps it as long as the request lives.  Raises TooLarge as soon as it is
        known, Overloaded if bodies fill their memory, BadRequest if the transfer is damaged.
        """
        self._check(http.content_length or 0)
        body = bytearray()
        counted = _Counted(self)
        stack.callback(counted.give)
        try:
            async for piece in http.content.iter_any():
                self._check(len(body) + len(piece))
                counted.take(len(piece))
                body += piece
        except web.RequestPayloadError:
            raise BadRequest("The body could not be read") from None
        # What is done with a body takes half a millisecond and more.  Hundreds that come in the same instant would
        # keep tokens, health and workers waiting: so one in each pass of the event loop.
        async with self._turn:
            await asyncio.sleep(0)
        return body

    async def expect(self, http: web.Request) -> web.StreamResponse | None:
        """Answer `Expect: 100-continue`; a body that is too large is refused before it is sent."""
        try:
            self._check(http.content_length or 0)
        except TooLarge as error:
            return faults.response(error)
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # aiohttp takes bytes written for a begun response, after which it could not send another.
        http.writer.output_size = 0
        return None

    def _check(self, size: int) -> None:
        if size > self._each:
            raise TooLarge(f"The body is over the limit of {self._each} bytes")


class _Counted:
    """The bytes of one body."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._bytes = 0

    def take(self, size: int) -> None:
        # Refused, not waited for: whoever waits with half a body may wait for another who does.
        if self._bodies.held + size > self._bodies.all_bytes_max:
            raise Overloaded("Too many large requests are being read; try again later")
        self._bytes += size
        self._bodies.held += size

    def give(self) -> None:
        self._bodies.held -= self._bytes
