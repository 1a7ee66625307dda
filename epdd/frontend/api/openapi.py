"""`/openapi.json`: every endpoint with its body, answers and error statuses.

Bodies are the structs that validate them (`schema.py`), answers those of `answer_schema.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epdd import __version__
from epdd.frontend.api.answer_schema import (ChatChunk, ChatCompletion, Error, Health, Model, ModelList, Pong,
                                             PublicStatus, Readiness, TextChunk, TextCompletion, Version)
from epdd.frontend.http.auth import OPEN
from epdd.frontend.requests import fields
from epdd.frontend.requests.schema import ChatBody, CompletionBody, DetokenizeBody, Detokenized, TokenizeBody, Tokenized

_Json = dict[str, Any]
_REF = "#/components/schemas/{name}"

_RED_PIXEL = ("data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mP4"
              "z8AAAAMBAQD3A0FDAAAAAElFTkSuQmCC")
_EXAMPLES: dict[type[msgspec.Struct], _Json] = {
    ChatBody: {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": _RED_PIXEL}},
        {"type": "text", "text": "What colour is this?"}]}], "max_tokens": 16},
    CompletionBody: {"prompt": "Once upon a time", "max_tokens": 16},
    TokenizeBody: {"prompt": "Hello"},
    DetokenizeBody: {"tokens": [0, 1, 2]},
}


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | None             # of a 200; None: text
    body: type[msgspec.Struct] | None = None
    refusals: tuple[int, ...] = ()                  # statuses besides 200 and, with API keys, 401
    unavailable: type[msgspec.Struct] = Error       # of a 503
    chunk: type[msgspec.Struct] | None = None       # of a stream


_READING = (400, 404, 413, 415, 429, 500, 504)           # endpoints with a body
_WORKING = (400, 404, 413, 415, 429, 500, 503, 504)      # endpoints that use workers

OPERATIONS = (
    *(Operation("post", prefix + path, summary, answer, body, refusals, chunk=chunk)
      for path, summary, body, answer, chunk, refusals in (
          ("/chat/completions", "Answer a conversation with images", ChatBody, ChatCompletion, ChatChunk, _WORKING),
          ("/completions", "Continue a text", CompletionBody, TextCompletion, TextChunk, _WORKING),
          ("/tokenize", "Tokens of a text or a conversation", TokenizeBody, Tokenized, None, _READING),
          ("/detokenize", "Text of tokens", DetokenizeBody, Detokenized, None, _READING))
      for prefix in ("/v1", "")),
    Operation("get", "/v1/models", "The models", ModelList),
    Operation("get", "/v1/models/{name}", "A model", Model, refusals=(404,)),
    Operation("get", "/health", "Whether the daemon serves or is starting", Health, refusals=(503,),
              unavailable=Health),
    Operation("get", "/ready", "Whether a request with an image can be served now", Readiness, refusals=(503,),
              unavailable=Readiness),
    Operation("get", "/ping", "Whether the daemon answers", Pong),
    Operation("get", "/version", "The daemon's version", Version),
    Operation("get", "/status", "Workers, queue, budgets and latencies, as the chat page shows them", PublicStatus),
    Operation("get", "/metrics", "For Prometheus", None),
    Operation("get", "/openapi.json", "This document", msgspec.defstruct("OpenApi", [])),
)

_REFUSALS = {
    400: "The request is wrong: error.param names the field, error.code the fault",
    401: "The API key is missing or unknown",
    404: "No such model",
    413: "The body is over the limit",
    415: "The body is compressed",
    429: "Too many requests; try again after Retry-After seconds",
    500: "A fault of the server, logged with the request id",
    503: "Cannot be served now; try again after Retry-After seconds",
    504: "Not finished within the server's time limit (server.timeout_s)",
}


def document(models: Sequence[str], keyed: bool) -> _Json:
    """The OpenAPI document.  `models` are the names requests may use; `keyed`: there are API keys."""
    structs = {kind: None for operation in OPERATIONS
               for kind in (operation.answer, operation.body, operation.unavailable, operation.chunk) if kind}
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REF)
    for kind in (ChatBody, CompletionBody):
        schemas[kind.__name__]["properties"].update(fields.properties(kind.__struct_fields__))
    for schema in schemas.values():
        if "model" in schema["properties"] and "object" not in schema["properties"]:    # a body's, not an answer's
            schema["properties"]["model"]["anyOf"] = [{"enum": list(models)}, {"type": "null"}]
    paths: dict[str, _Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, models, keyed)
    components: _Json = {"schemas": schemas}
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {"openapi": "3.1.0", "info": {"title": "epdd", "version": __version__,
                                         "description": "Every answer carries its request's id as x-request-id."},
            "paths": paths, "components": components}


def _operation(operation: Operation, models: Sequence[str], keyed: bool) -> _Json:
    guarded = keyed and operation.path not in OPEN
    content: _Json = {"application/json": _schema(operation.answer)} if operation.answer else \
        {"text/plain": {"schema": {"type": "string"}}}
    if operation.chunk:
        # If `stream` is set.  Tools read it as the schema of one event.
        frame = {"anyOf": [_schema(operation.chunk)["schema"], _schema(Error)["schema"]]}
        content["text/event-stream"] = {"schema": {"type": "object", "required": ["data"], "properties": {"data": {
            "anyOf": [{"type": "string", "contentMediaType": "application/json", "contentSchema": frame},
                      {"const": "[DONE]"}]}}}}
    answers: _Json = {"200": {"description": "Done", "content": content}}
    for status in (*operation.refusals, *((401,) if guarded else ())):
        kind = operation.unavailable if status == 503 else Error
        answers[str(status)] = {"description": _REFUSALS[status], "content": {"application/json": _schema(kind)}}
        if status in (429, 503) and kind is Error:
            answers[str(status)]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    found: _Json = {"summary": operation.summary, "responses": answers}
    if operation.body:
        found["requestBody"] = {"required": True, "content": {"application/json": {
            **_schema(operation.body), "example": _EXAMPLES[operation.body]}}}
    if "{name}" in operation.path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True,
                                "schema": {"type": "string", "minLength": 1, "examples": list(models)}}]
    if guarded:
        found["security"] = [{"key": []}]
    return found


def _schema(kind: type[msgspec.Struct]) -> _Json:
    return {"schema": {"$ref": _REF.format(name=kind.__name__)}}
