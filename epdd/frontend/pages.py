"""The small endpoints: models, health, version, metrics, the API's description."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from epdd import __version__
from epdd.frontend import exposition, openai, openapi
from epdd.frontend.answers import model_card
from epdd.frontend.context import Context
from epdd.frontend.keys import Keys


class Pages:
    """Their handlers."""

    def __init__(self, context: Context, keys: Keys) -> None:
        self._context = context
        self._keys = keys
        self._openapi: dict[bool, bytes] = {}       # by whether there are keys
        self._exposition = exposition.Exposition(context.stats, context.connections, context.status)

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card(name) for name in self._context.model_names]})

    async def model(self, request: web.Request) -> web.Response:
        return _json(self._card(openai.check_model(request.match_info["name"], self._context.model_names)))

    async def health(self, request: web.Request) -> web.Response:
        """200 while the daemon can serve text at least, or will; 503 when the workers for it were given up."""
        status = self._context.status()
        word = {"ready": "ok"}.get(status["state"], status["state"])
        # Who, but not why: errors may name files, and this page is everybody's.  `epdctl status` has them.
        why = [f"{worker['name']} {str(worker['state']).lower()}" for worker in status["workers"]
               if str(worker["state"]).lower() != "ready"]
        return _json({"status": word, "why": why, "workers": _by_role(status)}, 503 if word == "failed" else 200)

    async def ready(self, request: web.Request) -> web.Response:
        """200 when a request with an image could be served now."""
        status = self._context.status()
        roles = _by_role(status)
        ready = (status["state"] not in ("draining", "failed")
                 and all(roles.get(role, {}).get("ready") for role in ("encoder", "pd")))
        return _json({"ready": ready, "workers": roles}, 200 if ready else 503)

    async def ping(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": __version__})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._exposition.text(), headers={"Content-Type": exposition.CONTENT_TYPE})

    async def openapi(self, request: web.Request) -> web.Response:
        keyed = self._keys.needed
        if keyed not in self._openapi:      # 40 ms of work that most daemons are never asked for
            self._openapi[keyed] = orjson.dumps(openapi.document(self._context.model_names, keyed))
        return web.Response(body=self._openapi[keyed], content_type="application/json")

    def _card(self, name: str) -> dict[str, Any]:
        context = self._context
        return model_card(name, context.model_name, context.created, context.context_max(), context.emulated)


def _by_role(status: dict[str, Any]) -> dict[str, dict[str, int]]:
    """How many workers of each role are in each state."""
    roles: dict[str, dict[str, int]] = {}
    for worker in status["workers"]:
        states = roles.setdefault(worker["role"], {})
        state = str(worker["state"]).lower()
        states[state] = states.get(state, 0) + 1
    return roles


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
