"""CORS: pages of the origins in server.cors_origins may use the API in a browser, no others."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

_MAX_AGE_S = 600        # for which a browser caches a preflight; Chromium's own limit is 7,200
_EXPOSED = "x-request-id, retry-after"


class Cors:
    """`origins` as browsers send them (https://chat.example.com), or "*" for all."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def middleware(self) -> Middleware:
        """Answers preflights, which carry no key."""

        @web.middleware
        async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            method = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
            if request.method != hdrs.METH_OPTIONS or method is None or not self._allowed(request):
                return await handler(request)
            return web.Response(status=204, headers={
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, HEAD, POST",
                # "*" would not include Authorization.
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, ""),
                hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE_S)})

        return preflight

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Called for every answer, streams and errors too: without the header a page cannot read even an error."""
        if not self._origins:
            return
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if self._allowed(request):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = request.headers[hdrs.ORIGIN]
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    def _allowed(self, request: web.Request) -> bool:
        origin = request.headers.get(hdrs.ORIGIN)
        return origin is not None and ("*" in self._origins or origin in self._origins)
