"""The daemon's end of a worker's socket: hands work over, sorts what comes back, cancels.

A `Work` ends exactly once: by its last message, or by `fail` after the process has exited.  Until then the
worker may still touch the work's leases, so whoever holds them for it lets go in `on_end`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from epdd.errors import EpddError, ProtocolError
from epdd.wire import (Cancel, Cancelled, CloseArena, Done, Encode, Encoded, Failed, FrameBuffer, FromWorker, Generate,
                       Heartbeat, Loading, OpenArena, Opened, Prefilled, Ready, Tokens, from_worker, pack)

log = logging.getLogger(__name__)

WorkEvent = Encoded | Prefilled | Tokens | Done | Failed | Cancelled | EpddError
Report = Loading | Ready | Heartbeat | Opened | Failed       # of no work
LAST = (Encoded, Done, Failed, Cancelled, EpddError)
ANSWERS = {Encode: (Encoded, Failed, Cancelled), Generate: (Prefilled, Tokens, Done, Failed, Cancelled)}


class Work:
    """Something handed to a worker and not yet ended."""

    def __init__(self, channel: "Channel", message: Encode | Generate, cost: int, expected_s: float,
                 sink: Callable[[WorkEvent], None]) -> None:
        self.id = message.id
        self.answers = ANSWERS[type(message)]   # what a worker may say to it
        self.cost = cost                    # patches, or tokens to prefill and decode; who gave it may lower it
        self.expected_s = expected_s        # its longest step, by the worker's own measure
        self.ended = False
        self._channel = channel
        self._sink = sink
        self._cancelled = False
        self._on_end: list[Callable[[], None]] = []

    def on_end(self, call: Callable[[], None]) -> None:
        """Run `call` when no worker can touch this work's leases any more."""
        if self.ended:
            call()
        else:
            self._on_end.append(call)

    def cancel(self) -> None:
        """Ask the worker to stop; the work still ends only by its last message.  Idempotent."""
        if not self.ended and not self._cancelled:
            self._cancelled = True
            self._channel.send(Cancel(self.id))

    def mute(self) -> None:
        """Nobody listens any more; `on_end` still runs."""
        self._sink = _ignore

    def give_up(self, error: EpddError) -> None:
        """Tell who waits; the leases stay held until the work ends."""
        self._tell(error)
        self.mute()

    def deliver(self, event: WorkEvent) -> None:
        """An event for this work, from the channel alone."""
        # The sink first: it decides what becomes of a lease before the holds on it are let go.
        last = isinstance(event, LAST)
        self.ended = self.ended or last
        self._tell(event)
        if last:
            for call in self._on_end:
                call()

    def _tell(self, event: WorkEvent) -> None:
        try:
            self._sink(event)
        except Exception:
            # A bug of ours: it must not keep the leases, nor the other works of a lost worker from ending.
            log.exception("%s was not taken by work %s", type(event).__name__, self.id)


def _ignore(event: WorkEvent) -> None:
    pass


class _FrameReader(asyncio.Protocol):
    """Takes a worker's messages as their bytes come, without a task between."""

    def __init__(self, take: Callable[[FromWorker], None], ended: asyncio.Future[None]) -> None:
        """`ended` is done at the end of the stream, or has the error that ended the reading: then no more is taken."""
        self._take, self.ended = take, ended
        self._frames = FrameBuffer(from_worker)

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            for message, raw in self._frames.feed(data):
                if raw:
                    raise ProtocolError("a worker's message carries no raw bytes")
                self._take(message)
        except Exception as error:
            self.ended.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Channel:
    """Frames to and from one worker process."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._transport: asyncio.Transport | None = None
        self.works: dict[str, Work] = {}
        self.last_heard = time.monotonic()
        self._failed: EpddError | None = None

    async def read(self, on_message: Callable[[Report], None]) -> None:
        """Serve the socket until its end.  Messages that belong to no work go to `on_message`.

        Returns at end of stream; raises ProtocolError on a malformed or unexpected message.
        """
        def take(message: FromWorker) -> None:
            self.last_heard = time.monotonic()
            self._sort(message, on_message)

        loop = asyncio.get_running_loop()
        reading = _FrameReader(take, loop.create_future())
        self._transport, _ = await loop.create_connection(lambda: reading, sock=self._sock)
        try:
            await reading.ended
        finally:
            reading.ended.cancel()

    def _sort(self, message: FromWorker, on_message: Callable[[Report], None]) -> None:
        if isinstance(message, (Loading, Ready, Heartbeat, Opened)) or (isinstance(message, Failed) and not message.id):
            on_message(message)
            return
        work = self.works.get(message.id)
        if work is None:
            raise ProtocolError(f"{type(message).__name__} for unknown work {message.id!r}")
        if not isinstance(message, work.answers):
            raise ProtocolError(f"{type(message).__name__} is no answer to work {message.id!r}")
        if isinstance(message, LAST):
            del self.works[message.id]
        work.deliver(message)

    def start(self, message: Encode | Generate, raw: bytes, cost: int, expected_s: float,
              sink: Callable[[WorkEvent], None]) -> Work:
        """Hand work over; its events go to `sink`, in order, in the event loop.

        The socket's buffer is bounded by what dispatch hands over: a few images or one prompt a request.
        """
        assert message.id not in self.works, "work ids are unique"
        if self._failed is not None:
            raise self._failed
        work = Work(self, message, cost, expected_s, sink)
        self.works[work.id] = work
        self._write(pack(message, raw))
        return work

    def send(self, message: Cancel | OpenArena | CloseArena) -> None:
        """A message that starts no work."""
        self._write(pack(message))

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    @property
    def in_flight_cost(self) -> int:
        return sum(work.cost for work in self.works.values())

    @property
    def expected_s(self) -> float:
        """The longest step of the work in flight: for so long no beat can come."""
        return max((work.expected_s for work in self.works.values()), default=0.0)

    def close(self) -> None:
        """Hang up: a living worker takes it as the order to exit."""
        if self._transport is not None:
            self._transport.close()
        else:
            self._sock.close()

    def give_up(self, error: EpddError) -> None:
        """The process was killed and is not gone: nobody shall wait for it, but it may still touch its leases."""
        self._failed = error
        for work in list(self.works.values()):
            work.give_up(error)

    def fail(self, error: EpddError) -> None:
        """End all work with `error`.  Invariant: only after the process has exited."""
        self._failed = error
        works, self.works = list(self.works.values()), {}
        for work in works:
            work.deliver(error)
