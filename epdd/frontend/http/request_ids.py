"""Ids of a request: the daemon's own, the one its client sees, and both for the log."""

from __future__ import annotations

import re
import uuid

from aiohttp import web

_OWN = web.RequestKey("own_id", str)
_CLIENT_CHARS_MAX = 128
_CLIENT_ODD = re.compile(r"[^A-Za-z0-9._:-]+")


def own(http: web.BaseRequest, kind: str = "req") -> str:
    """The daemon's id: unique; the first call decides that it begins with `kind`.

    The client's X-Request-ID is not used as a key: two requests may carry the same.
    """
    if _OWN not in http:
        http[_OWN] = f"{kind}-{uuid.uuid4().hex}"
    return http[_OWN]


def shown(http: web.Request) -> str:
    """For the x-request-id header: the client's without odd characters, or the daemon's."""
    return client(http) or own(http)


def logged(http: web.Request) -> str:
    """Both, for log lines."""
    given = client(http)
    return f"{own(http)} x_request_id={given}" if given else own(http)


def client(http: web.Request) -> str:
    """The client's X-Request-ID without odd characters; empty without one."""
    return _CLIENT_ODD.sub("", http.headers.get("X-Request-ID", ""))[:_CLIENT_CHARS_MAX]
