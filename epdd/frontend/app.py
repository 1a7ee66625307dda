"""The HTTP server: routes, request ids, errors to answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from epdd import __version__
from epdd.errors import NotFound
from epdd.frontend import chat, exposition, faults, ids
from epdd.frontend.answers import model_card
from epdd.frontend.context import Context
from epdd.frontend.media import Media
from epdd.frontend.metrics import RequestStats
from epdd.frontend.prompt import PromptMaker

_CHAT = web.AppKey("chat", chat.ChatCompletions)
_THREADS = 2    # for large images and long prompts: the cores belong to the workers


def build(context: Context) -> web.Application:
    """The application, to be run with handler_cancellation=True: a client that leaves cancels its request.

    Raises ModelError if the checkpoint's tokenizer or template cannot be used.
    """
    executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="frontend")
    prompts = PromptMaker(context.family, executor)
    app = web.Application(middlewares=[_errors(context.stats)])
    app.on_response_prepare.append(_mark)

    async def lifetime(app: web.Application) -> AsyncIterator[None]:
        media = Media(context.config.media, context.family, executor)
        endpoint = app[_CHAT] = chat.ChatCompletions(context, media, prompts)
        context.stats.gauges.update(images=lambda: media.budget.used, bodies=lambda: endpoint.bodies.held)
        yield
        await media.close()
        executor.shutdown(wait=False, cancel_futures=True)

    app.cleanup_ctx.append(lifetime)
    for path in ("/v1/chat/completions", "/chat/completions"):
        app.router.add_post(path, _chat, expect_handler=_expect)
    pages = _Pages(context)
    for path, page in (("/v1/models", pages.models), ("/v1/models/{name:.+}", pages.model),
                       ("/health", pages.health), ("/ready", pages.ready), ("/ping", pages.ping),
                       ("/version", pages.version), ("/metrics", pages.metrics)):
        app.router.add_get(path, page)
    return app


async def _chat(request: web.Request) -> web.StreamResponse:
    return await request.app[_CHAT](request)


async def _expect(request: web.Request) -> web.StreamResponse | None:
    return await request.app[_CHAT].bodies.expect(request)


def _errors(stats: RequestStats) -> Middleware:
    """Every failure becomes an answer in the API's envelope, and every answer is counted."""

    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = faults.of_http(error, request.method, request.path)
        except Exception as error:
            fault = faults.known(error, ids.logged(request))
            stats.errors[fault.code] += 1
            response = faults.response(fault)
        stats.statuses[response.status] += 1
        return response

    return errors


async def _mark(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = ids.shown(request)
    response.headers["Server"] = "epdd"


class _Pages:
    """The small endpoints."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._exposition = exposition.Exposition(context.stats, context.status)

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self._context.model_name:
            raise NotFound(f"The model `{name[:100]}` does not exist", code="model_not_found", param="model")
        return _json(self._card())

    async def health(self, request: web.Request) -> web.Response:
        """200 while the daemon can serve or will; 503 when a role has no worker that ever could."""
        status = self._context.status()
        roles = _by_role(status)
        dead = status["state"] == "failed" or any(set(states) == {"failed"} for states in roles.values())
        word = "failed" if dead else {"ready": "ok"}.get(status["state"], status["state"])
        # No reasons here: they may name files, and this page is everybody's.  `epdctl status` has them.
        return _json({"status": word, "workers": roles}, 503 if dead else 200)

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

    def _card(self) -> dict[str, Any]:
        context = self._context
        return model_card(context.model_name, context.created, context.context_max(), context.emulated)


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
