"""Request bodies: read within limits of size and time, and freed as soon as they are parsed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from aiohttp import web

from epdd.errors import BadRequest, Overloaded, RequestError, RequestTimeout, TooLarge, UnsupportedEncoding
from epdd.frontend.http import error_responses

RATE_MIN = 512              # bytes a second: a slower body is refused (408)
SLOW = 128 << 10            # bytes a second: a slower body is evicted for others; eight photos would take 8 minutes
_LOOK_S = 1.0               # seconds over which the speed of a body is measured


class Bodies:
    """Bounds the size of each body and of all together, and the time that each takes."""

    def __init__(self, each_bytes_max: int, all_bytes_max: int, stall_s: float) -> None:
        """`stall_s`: seconds over which a body must bring RATE_MIN; 0: no limit."""
        self._each = each_bytes_max
        self.all_bytes_max = max(each_bytes_max, all_bytes_max)
        self._stall_s = stall_s
        self.held = 0       # bytes
        self._reading: set[_BodyBytes] = set()
        self._turn = asyncio.Lock()

    async def read(self, http: web.Request, stack: AsyncExitStack) -> bytearray:
        """The body, counted as held until `stack` closes.

        `http.read()` would keep it as long as the request lives.  Raises TooLarge as soon as the size is known,
        UnsupportedEncoding if it is compressed, Overloaded if bodies fill their memory, RequestTimeout if it stalls,
        BadRequest if the transfer is damaged.
        """
        self._check_head(http)
        body = bytearray()
        counted = _BodyBytes(self, self._stall_s)
        stack.callback(counted.release)
        self._reading.add(counted)
        try:
            async with counted.deadline:
                while piece := await http.content.readany():
                    self._check(len(body) + len(piece))
                    counted.take(len(piece))
                    body += piece
        except web.RequestPayloadError:
            raise BadRequest("The body could not be read") from None
        except TimeoutError:
            if counted.evicted:
                raise _no_room() from None
            raise RequestTimeout(f"The body came too slowly: less than {RATE_MIN} bytes a second for "
                                 f"{self._stall_s:g} s (server.body_timeout_s)") from None
        finally:
            self._reading.discard(counted)
        # Handling a body takes half a millisecond and more.  Hundreds at once would delay tokens, probes and workers:
        # so each pass of the event loop handles one.
        async with self._turn:
            await asyncio.sleep(0)
        return body

    def evict(self, asks: _BodyBytes | None = None) -> bool:
        """Evict the slowest body, which gets a 429; False if none but that of `asks` is slow."""
        slow = [(speed, other) for other in self._reading
                if other is not asks and not other.evicted and (speed := other.speed()) < SLOW]
        if not slow:
            return False
        min(slow, key=lambda pair: pair[0])[1].evict()
        return True

    def room(self, size: int, asks: _BodyBytes) -> bool:
        """Whether `size` more bytes fit, after slow bodies were evicted."""
        while self.held + size > self.all_bytes_max:
            if not self.evict(asks):
                return False
        return True

    async def expect(self, http: web.Request) -> web.StreamResponse | None:
        """Answer `Expect: 100-continue`; a body that is too large is refused before it is sent."""
        try:
            self._check_head(http)
        except RequestError as error:
            return error_responses.response(error)
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # aiohttp takes written bytes for a response that has begun, and could not send another.
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


class _BodyBytes:
    """The bytes of one body, and how fast they come."""

    def __init__(self, bodies: Bodies, stall_s: float) -> None:
        self._bodies = bodies
        self._bytes = 0
        self._stall_s = stall_s
        self._clock = asyncio.get_running_loop().time
        self._due = 0                       # bytes since the deadline was last extended
        self._looked, self._since, self._speed = self._clock(), 0, float("inf")
        self.deadline = asyncio.timeout(stall_s or None)
        self.evicted = False

    def take(self, size: int) -> None:
        # Refused, not waited for: two half-read bodies that wait for each other's room would wait for ever.
        if not self._bodies.room(size, self):
            raise _no_room()
        self._bytes += size
        self._bodies.held += size
        self._since += size
        self._due += size
        if self._stall_s and self._due >= RATE_MIN * self._stall_s and not self.deadline.expired():
            self._due = 0
            self.deadline.reschedule(self._clock() + self._stall_s)

    def speed(self) -> float:
        """Bytes a second, measured at most once a second."""
        passed = self._clock() - self._looked
        if passed >= _LOOK_S:
            self._looked, self._speed, self._since = self._clock(), self._since / passed, 0
        return self._speed

    def evict(self) -> None:
        """End this body: another body or connection gets its room at once."""
        self.evicted = True
        if not self.deadline.expired():
            self.deadline.reschedule(self._clock())
        self.release()

    def release(self) -> None:
        self._bodies.held -= self._bytes
        self._bytes = 0


def _no_room() -> Overloaded:
    return Overloaded("Too many large requests are being read; try again later")
