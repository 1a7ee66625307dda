"""The daemon's end of a worker's socket: hands work over, routes answers to it, cancels.

A `Work` ends exactly once: by its last message, or by `fail` after the process has exited.  Until then the
worker may still touch the work's leases, so they are released in `on_end` and not before.
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
Report = Loading | Ready | Heartbeat | Opened | Failed       # messages that belong to no work
LAST = (Encoded, Done, Failed, Cancelled, EpddError)
ANSWERS = {Encode: (Encoded, Failed, Cancelled), Generate: (Prefilled, Tokens, Done, Failed, Cancelled)}


class Work:
    """A message handed to a worker, until its last answer."""

    def __init__(self, channel: "Channel", message: Encode | Generate, cost: int, expected_s: float,
                 sink: Callable[[WorkEvent], None]) -> None:
        self.id = message.id
        self.answers = ANSWERS[type(message)]   # messages that may answer it
        self.cost = cost                    # patches, or tokens to prefill and decode; the caller may lower it
        self.expected_s = expected_s        # its longest step, by the worker's time model
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
        """Drop further events; `on_end` still runs."""
        self._sink = _ignore

    def give_up(self, error: EpddError) -> None:
        """Fail the work for its caller; the leases stay held until the work ends."""
        self._emit(error)
        self.mute()

    def deliver(self, event: WorkEvent) -> None:
        """Pass an event on.  Only the channel calls this."""
        # The sink first: it decides what becomes of a lease before `on_end` releases it.
        last = isinstance(event, LAST)
        self.ended = self.ended or last
        self._emit(event)
        if last:
            for call in self._on_end:
                call()

    def _emit(self, event: WorkEvent) -> None:
        try:
            self._sink(event)
        except Exception:
            # A bug in the sink must not keep the leases held, nor keep other work of a lost worker from ending.
            log.exception("handling %s of work %s failed", type(event).__name__, self.id)


def _ignore(event: WorkEvent) -> None:
    pass


class _FrameReader(asyncio.Protocol):
    """Calls `take` with each of a worker's messages as its bytes arrive, without a task in between."""

    def __init__(self, take: Callable[[FromWorker], None], ended: asyncio.Future[None]) -> None:
        """`ended` is done at the end of the stream, or has the error that ended the reading."""
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
        """Read the socket to its end.  Messages that belong to no work go to `on_message`.

        Raises ProtocolError on a malformed or unexpected message.
        """
        def take(message: FromWorker) -> None:
            self.last_heard = time.monotonic()
            self._route(message, on_message)

        loop = asyncio.get_running_loop()
        reading = _FrameReader(take, loop.create_future())
        self._transport, _ = await loop.create_connection(lambda: reading, sock=self._sock)
        try:
            await reading.ended
        finally:
            reading.ended.cancel()

    def _route(self, message: FromWorker, on_message: Callable[[Report], None]) -> None:
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

        The socket's buffer needs no limit of its own: dispatch hands over a few images or one prompt a request.
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
        """The longest step of the work in flight, during which no heartbeat can come."""
        return max((work.expected_s for work in self.works.values()), default=0.0)

    def close(self) -> None:
        """Close the socket: a living worker exits when it sees that."""
        if self._transport is not None:
            self._transport.close()
        else:
            self._sock.close()

    def give_up(self, error: EpddError) -> None:
        """Fail all work of a process that was killed and has not exited: it may still touch its leases."""
        self._failed = error
        for work in list(self.works.values()):
            work.give_up(error)

    def fail(self, error: EpddError) -> None:
        """End all work with `error`.  Invariant: only after the process has exited."""
        self._failed = error
        works, self.works = list(self.works.values()), {}
        for work in works:
            work.deliver(error)
