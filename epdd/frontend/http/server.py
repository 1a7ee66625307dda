"""The HTTP server below the application: limits of connections, and answers to bytes that are not a request.

aiohttp answers such bytes in plain text, before any middleware.  The subclasses here answer in the API's envelope, with
a request id, and count it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import termios
import time
from array import array
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from epdd.errors import BadRequest, CapacityError, EpddError, RequestError, RequestTimeout
from epdd.frontend.http import error_responses, request_ids
from epdd.frontend.http.connections import Connections
from epdd.ops.metrics import RequestStats

log = logging.getLogger(__name__)

_LINGER_S = 1.0             # bytes that come within this time of a 408 are read and dropped
_BACKLOG = 128              # as aiohttp's own
_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_TURN_S = 0.005             # of parsing, before other connections are served
# Parsed at once, and half of what is read at once: 4 ms, and 20 ms, if each byte is a chunk, else far less.
_PIECE_BYTES = 16 << 10

_QUICK = ("GET", "HEAD")        # methods that are answered at once


def both_families(port: int) -> socket.socket:
    """A listener for every address of IPv6 and IPv4, or of IPv4 if the machine has no IPv6.  Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=_BACKLOG)


class Runner(web.AppRunner):
    """Serves an application; a client that leaves cancels its request."""

    def __init__(self, app: web.Application, stats: RequestStats, connections: Connections,
                 shutdown_timeout_s: float) -> None:
        # Without auto_decompress=False aiohttp would unpack a body as it comes: a megabyte can hold a gigabyte.
        super().__init__(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s,
                         auto_decompress=False, read_bufsize=_PIECE_BYTES)
        self._stats = stats
        self._connections = connections

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        server = _Server(made.request_handler, request_factory=made.request_factory,
                         handler_cancellation=made.handler_cancellation, loop=made._loop, **made._kwargs)
        server.stats, server.book = self._stats, self._connections
        return server

    async def cleanup(self) -> None:
        self._connections.close()
        await super().cleanup()


class _Server(web.Server):
    stats: RequestStats
    book: Connections

    def __call__(self) -> RequestHandler:
        connection = _Connection(self, loop=self._loop, **self._kwargs)
        connection.stats, connection.book = self.stats, self.book
        return connection


class _Connection(RequestHandler):
    """aiohttp's, which reports to `book` what it waits for."""

    __slots__ = ("stats", "book", "_resting", "_begun", "_posted", "_half_closed", "_came", "_waits_turn", "_ended")
    stats: RequestStats
    book: Connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._resting, self._begun, self._posted, self._half_closed = True, False, False, False
        self._came, self._waits_turn, self._ended = bytearray(), False, False
        super().connection_made(transport)
        if not self.book.opened(self):
            self._say(CapacityError("The server has no room for another connection; try again later",
                                    code="connections_full"))
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.book.ended(self)
        self._came.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not data:        # aiohttp's own call: its parser had paused, and continues with what it has
            self._parse(data)
            return
        self._came += data
        if not self._waits_turn:
            self._take()

    def _take(self) -> None:
        """Parse received bytes, for _TURN_S at most before other connections are served: one read can bring 40,000
        chunks of one byte, each of which runs Python code."""
        self._waits_turn = False
        until = time.thread_time() + _TURN_S
        # A paused parser of aiohttp would keep these bytes and parse all of them at once later.
        while self._came and not self._reading_paused and not self._buffer_paused:
            piece = bytes(self._came[:_PIECE_BYTES])
            del self._came[:_PIECE_BYTES]
            self._parse(piece)
            if self._came and time.thread_time() > until:
                self._later()
                return
        if self._ended and not self._came and not self.eof_received() and self.transport is not None:
            self.transport.close()

    def _later(self) -> None:
        self._pause_transport_reading()
        if not self._waits_turn:
            self._waits_turn = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._take()
        if not self._waits_turn and not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def _resume_transport_reading(self) -> None:
        """Called by aiohttp when it can take more."""
        if self._came:
            self._later()
        else:
            super()._resume_transport_reading()

    def _parse(self, data: bytes) -> None:
        if self._resting and data and not self._begun:
            self._begun = True
            self.book.waits(self, "head")
        super().data_received(data)
        # A message that is not HTTP has no method, and is answered at once too.
        if self._messages:
            self._resting = False
            self._posted = self._posted or any(isinstance(message, RawRequestMessage) and message.method not in _QUICK
                                               for message, _ in self._messages)

    async def _handle_request(self, request: web.BaseRequest, start_time: float | None, request_handler: _Handler
                              ) -> tuple[web.StreamResponse, bool]:
        self._resting = False
        self.book.busy(self)
        try:
            response, reset = await super()._handle_request(request, start_time, request_handler)
        finally:
            self._resting, self._begun = not self._messages, False
            if self._resting:
                self._posted = False
                self._close = self._close or self._half_closed
            self.book.waits(self, "idle")
        if response.status == RequestTimeout.status:
            # While the client sends, closing would reset the connection and lose the answer; in _LINGER_S it has it.
            self._lingering_time = _LINGER_S
        return response, reset

    def pause_writing(self) -> None:
        super().pause_writing()
        self.book.waits(self, "stalled")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._resting:
            self.book.waits(self, "idle")
        else:
            self.book.busy(self)

    def eof_received(self) -> bool:     # type: ignore[override]
        """The client sends no more; the server cannot tell whether it still reads.

        A GET is answered.  A POST can take minutes of a worker, so it ends with an error, which a client that still
        reads gets.
        """
        if self._came:                  # not parsed yet
            self._ended = True
            return True
        if self._resting:
            return False                # no request is open
        if not self._posted:
            self._half_closed = True    # closed after the answer
            return True
        request = self._current_request
        if request is None or not request.writer.output_size:
            self._say(BadRequest("The client closed its side of the connection before the answer was out, which ends "
                                 "the request; keep it open until the answer is read", code="client_left"))
        return False

    def expire(self, reason: str) -> None:
        """As HttpConnection."""
        if reason == "stalled":
            self.drop()
        elif reason == "head" and self._begun and self._waiter is not None and not self._waiter.done():
            fault = HttpProcessingError(code=RequestTimeout.status, message="")
            self._messages.append((_ErrInfo(status=fault.code, exc=fault, message=""), EMPTY_PAYLOAD))
            self._waiter.set_result(None)
        else:
            self.force_close()

    def drop(self) -> None:
        """As HttpConnection."""
        if self.transport is not None:
            self.transport.abort()

    def has_unread(self) -> bool:
        """As HttpConnection."""
        if self.transport is None or self.transport.is_closing():
            return False
        waiting = array("i", [0])
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.FIONREAD, waiting)
        return bool(self._came or waiting[0])

    def _say(self, fault: EpddError) -> None:
        """Write an answer without a parsed request."""
        self.stats.statuses[fault.status] += 1
        self.stats.errors[fault.code] += 1
        if self.transport is not None:
            self.transport.write(error_responses.raw(fault))

    def handle_error(self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None,
                     message: str | None = None) -> web.StreamResponse:
        """The answer to bytes that could not be parsed; aiohttp then closes the connection."""
        if not isinstance(exc, HttpProcessingError) or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        # Its bytes are neither quoted nor logged: they may hold a key.
        fault: RequestError = RequestError("This is not HTTP that the server can read", code="invalid_http")
        if status == RequestTimeout.status:
            fault = RequestTimeout("The head of the request was not whole in time (server.head_timeout_s)")
        answer = error_responses.response(fault, {"x-request-id": request_ids.own(request), "Server": "epdd"})
        answer.set_status(status)
        answer.force_close()
        self.stats.statuses[status] += 1
        self.stats.errors[fault.code] += 1
        log.debug("%s is no request code=%s from=%s", request_ids.own(request), fault.code, request.remote)
        return answer
