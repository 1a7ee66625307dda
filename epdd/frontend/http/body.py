"""Request bodies: read within limits of their own, and held no longer than they are needed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from aiohttp import web

from epdd.errors import BadRequest, Overloaded, RequestError, RequestTimeout, TooLarge, UnsupportedEncoding
from epdd.frontend.http import error_responses

RATE_MIN = 512              # bytes a second below which a body is given up
SLOW = 128 << 10            # bytes a second below which one gives way to others; eight photos would take 8 minutes
_LOOK_S = 1.0               # over which the speed of a body is measured


class Bodies:
    """Bounds each body, all that are in memory at once, and the time that each takes."""

    def __init__(self, each_bytes_max: int, all_bytes_max: int, stall_s: float) -> None:
        """`stall_s`: in which a body must bring RATE_MIN a second; 0: it may take any time."""
        self._each = each_bytes_max
        self.all_bytes_max = max(each_bytes_max, all_bytes_max)
        self._stall_s = stall_s
        self.held = 0       # bytes
        self._reading: set[_Counted] = set()
        self._turn = asyncio.Lock()

    async def read(self, http: web.Request, stack: AsyncExitStack) -> bytearray:
        """The body, counted as held until `stack` closes.

        Not by `http.read()`, which keeps it as long as the request lives.  Raises TooLarge as soon as it is
        known, UnsupportedEncoding for a compressed one, Overloaded if bodies fill their memory, RequestTimeout if it
        does not move, BadRequest if the transfer is damaged.
        """
        self._check_head(http)
        body = bytearray()
        counted = _Counted(self, self._stall_s)
        stack.callback(counted.give)
        self._reading.add(counted)
        try:
            async with counted.patience:
                while piece := await http.content.readany():
                    self._check(len(body) + len(piece))
                    counted.take(len(piece))
                    body += piece
        except web.RequestPayloadError:
            raise BadRequest("The body could not be read") from None
        except TimeoutError:
            if counted.given_way:
                raise _no_room() from None
            raise RequestTimeout(f"The body came too slowly: less than {RATE_MIN} bytes a second for "
                                 f"{self._stall_s:g} s (server.body_timeout_s)") from None
        finally:
            self._reading.discard(counted)
        # What is done with a body takes half a millisecond and more.  Hundreds that come in the same instant would
        # keep tokens, health and workers waiting: so one in each pass of the event loop.
        async with self._turn:
            await asyncio.sleep(0)
        return body

    def give_way(self, asks: _Counted | None = None) -> bool:
        """End the slowest body, which gets a 429; False if none of the others is slow."""
        slow = [(speed, other) for other in self._reading
                if other is not asks and not other.given_way and (speed := other.speed()) < SLOW]
        if not slow:
            return False
        min(slow, key=lambda pair: pair[0])[1].end()
        return True

    def room(self, size: int, asks: _Counted) -> bool:
        """Whether `size` more bytes may be held, after the slow have given way."""
        while self.held + size > self.all_bytes_max:
            if not self.give_way(asks):
                return False
        return True

    async def expect(self, http: web.Request) -> web.StreamResponse | None:
        """Answer `Expect: 100-continue`; a body that is too large is refused before it is sent."""
        try:
            self._check_head(http)
        except RequestError as error:
            return error_responses.response(error)
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # aiohttp takes bytes written for a begun response, after which it could not send another.
        http.writer.output_size = 0
        return None

    def _check_head(self, http: web.Request) -> None:
        encoding = http.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            raise UnsupportedEncoding(f"The body is compressed (Content-Encoding: {encoding[:40]}); send it as it is")
        self._check(http.content_length or 0)

    def _check(self, size: int) -> None:
        if size > self._each:
            raise TooLarge(f"The body is over the limit of {self._each} bytes")


class _Counted:
    """The bytes of one body, and how fast they come."""

    def __init__(self, bodies: Bodies, stall_s: float) -> None:
        self._bodies = bodies
        self._bytes = 0
        self._stall_s = stall_s
        self._clock = asyncio.get_running_loop().time
        self._due = 0                       # bytes that move the deadline on
        self._looked, self._since, self._speed = self._clock(), 0, float("inf")
        self.patience = asyncio.timeout(stall_s or None)
        self.given_way = False

    def take(self, size: int) -> None:
        # Refused, not waited for: whoever waits with half a body may wait for another who does.
        if not self._bodies.room(size, self):
            raise _no_room()
        self._bytes += size
        self._bodies.held += size
        self._since += size
        self._due += size
        if self._stall_s and self._due >= RATE_MIN * self._stall_s and not self.patience.expired():
            self._due = 0
            self.patience.reschedule(self._clock() + self._stall_s)

    def speed(self) -> float:
        """Bytes a second, over about the last second."""
        passed = self._clock() - self._looked
        if passed >= _LOOK_S:
            self._looked, self._speed, self._since = self._clock(), self._since / passed, 0
        return self._speed

    def end(self) -> None:
        """Give way: another body, or connection, needs the room, and has it at once."""
        self.given_way = True
        if not self.patience.expired():
            self.patience.reschedule(self._clock())
        self.give()

    def give(self) -> None:
        self._bodies.held -= self._bytes
        self._bytes = 0


def _no_room() -> Overloaded:
    return Overloaded("Too many large requests are being read; try again later")
