"""The HTTP server below the application: what is no HTTP at all is answered, named and counted like everything else.

aiohttp answers it before any middleware, in plain text; its classes for connections are taken as a base for that alone.
"""

from __future__ import annotations

import logging
import socket

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from epdd.errors import RequestError
from epdd.frontend import faults, ids
from epdd.frontend.metrics import RequestStats

log = logging.getLogger(__name__)

_BACKLOG = 128              # as aiohttp's own


def both_families(port: int) -> socket.socket:
    """A listener for every address of IPv6 and IPv4; for IPv4 alone where the machine has no IPv6.  Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=_BACKLOG)


class Runner(web.AppRunner):
    """Serves an application; a client that leaves cancels its request."""

    def __init__(self, app: web.Application, stats: RequestStats, shutdown_timeout_s: float) -> None:
        super().__init__(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s)
        self._stats = stats

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        server = _Server(made.request_handler, request_factory=made.request_factory,
                         handler_cancellation=made.handler_cancellation, loop=made._loop, **made._kwargs)
        server.stats = self._stats
        return server


class _Server(web.Server):
    stats: RequestStats

    def __call__(self) -> RequestHandler:
        connection = _Connection(self, loop=self._loop, **self._kwargs)
        connection.stats = self.stats
        return connection


class _Connection(RequestHandler):
    __slots__ = ("stats",)
    stats: RequestStats

    def handle_error(self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None,
                     message: str | None = None) -> web.StreamResponse:
        """The answer to what could not be parsed, after which aiohttp closes the connection."""
        if not isinstance(exc, HttpProcessingError) or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        # Its bytes are neither answered nor logged: there may be a key among them.
        fault = RequestError("This is not HTTP that the server can read", code="invalid_http")
        answer = faults.response(fault, {"x-request-id": ids.own(request), "Server": "epdd"})
        answer.set_status(status)
        answer.force_close()
        self.stats.statuses[status] += 1
        self.stats.errors[fault.code] += 1
        log.debug("%s is no HTTP from=%s", ids.own(request), request.remote)
        return answer
