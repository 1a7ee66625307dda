"""The small endpoints: models, health, version, metrics, the API's description."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from epdd import __version__
from epdd.frontend.api import openapi
from epdd.frontend.api.answers import model_card
from epdd.frontend.context import Context
from epdd.frontend.http.auth import Keys
from epdd.frontend.requests import completion_requests
from epdd.ops import exposition
from epdd.ops.status import States


class SystemRoutes:
    """Their handlers."""

    def __init__(self, context: Context, keys: Keys) -> None:
        self._context = context
        self._keys = keys
        self._probed: States | None = None
        self._probes: list[tuple[int, bytes]] = []
        self._openapi: dict[bool, bytes] = {}       # by whether there are keys
        self._exposition = exposition.Exposition(context.stats, context.connections, context.status)

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card(name) for name in self._context.model_names]})

    async def model(self, request: web.Request) -> web.Response:
        return _json(self._card(completion_requests.check_model(request.match_info["name"], self._context.model_names)))

    async def health(self, request: web.Request) -> web.Response:
        """503 once every prefill-decode worker has failed for good; else 200."""
        return self._probe(0)

    async def ready(self, request: web.Request) -> web.Response:
        """200 if a request with an image can be served now."""
        return self._probe(1)

    def _probe(self, which: int) -> web.Response:
        """Made again only if a state has changed: anybody may ask, at any rate."""
        states = self._context.states()
        if states is not self._probed:
            self._probed, self._probes = states, _probes(states)
        status, body = self._probes[which]
        return web.Response(body=body, status=status, content_type="application/json")

    async def ping(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": __version__})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._exposition.text(), headers={"Content-Type": exposition.CONTENT_TYPE})

    async def openapi(self, request: web.Request) -> web.Response:
        keyed = self._keys.needed
        if keyed not in self._openapi:      # 40 ms of work, which most daemons never need
            self._openapi[keyed] = orjson.dumps(openapi.document(self._context.model_names, keyed))
        return web.Response(body=self._openapi[keyed], content_type="application/json")

    def _card(self, name: str) -> dict[str, Any]:
        context = self._context
        return model_card(name, context.model_name, context.created, context.max_model_len(), context.emulated)


def _probes(states: States) -> list[tuple[int, bytes]]:
    """Status and body of /health and of /ready."""
    word = {"ready": "ok"}.get(states.state, states.state)
    roles: dict[str, dict[str, int]] = {}       # how many workers of each role are in each state
    for _, role, state in states.workers:
        roles.setdefault(role, {}).setdefault(state, 0)
        roles[role][state] += 1
    # Names without reasons: errors may name files, and anybody may read these pages.  `epdctl status` has the reasons.
    why = [f"{name} {state}" for name, _, state in states.workers if state != "ready"]
    ready = (states.state not in ("draining", "failed")
             and all(roles.get(role, {}).get("ready") for role in ("encoder", "pd")))
    return [(503 if word == "failed" else 200, orjson.dumps({"status": word, "why": why, "workers": roles})),
            (200 if ready else 503, orjson.dumps({"ready": ready, "workers": roles}))]


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
