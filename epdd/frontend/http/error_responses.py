"""Errors as answers: OpenAI's envelope, with the status and headers of each error."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web

from epdd.errors import CapacityError, EpddError, NotFound, RequestError, RequestTimeout

log = logging.getLogger(__name__)

_MESSAGE_CHARS_MAX = 1000       # a message may quote a long field; the answer stays small


def envelope(error: EpddError) -> dict[str, Any]:
    """The body of an error answer, and the frame of a stream that breaks."""
    return {"error": {"message": error.message[:_MESSAGE_CHARS_MAX], "type": error.type, "param": error.param,
                      "code": error.code}}


def response(error: EpddError, headers: dict[str, str] | None = None) -> web.Response:
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    answer = web.Response(status=error.status, headers=headers, body=orjson.dumps(envelope(error)),
                          content_type="application/json")
    if isinstance(error, RequestTimeout):
        answer.force_close()    # the rest of this request must not be read as the next one
    return answer


def raw(error: EpddError) -> bytes:
    """The bytes of a whole answer, for a connection that is closed without a parsed request."""
    body = orjson.dumps(envelope(error))
    return (f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\nServer: epdd\r\n\r\n").encode() + body


def known(error: Exception, request: str) -> EpddError:
    """`error`, or a general one for a bug.  Logs faults of the daemon and of workers; `request` names the request."""
    if isinstance(error, (RequestError, CapacityError)):
        return error
    if isinstance(error, EpddError):
        log.error("%s failed code=%s error=%s", request, error.code, error.message[:_MESSAGE_CHARS_MAX])
        return error
    log.error("%s failed by a bug", request, exc_info=error)
    # The exception's text is not sent: it may name files, addresses or the request's content.
    return EpddError("The server failed to answer; the fault is logged under the request id")


def of_http(error: web.HTTPException, method: str, path: str) -> web.Response:
    """aiohttp's own answers (no such route, wrong method, ...) in the envelope."""
    if error.status == 405:
        fault: EpddError = NotFound(f"{method[:20]} is not allowed here", code="method_not_allowed")
    elif error.status == 404:
        fault = NotFound(f"There is no {path[:200]} here")
    else:
        fault = RequestError(error.reason) if error.status < 500 else EpddError(error.reason)
    answer = response(fault, {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None)
    answer.set_status(error.status)
    return answer
