"""The HTTP application: routes, request ids, errors as answers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from epdd.errors import Unauthorized
from epdd.families.vocabulary import Vocabulary
from epdd.frontend import chat_page
from epdd.frontend.api.chat import ChatCompletions
from epdd.frontend.api.system_routes import SystemRoutes
from epdd.frontend.api.text_completions import TextCompletions
from epdd.frontend.api.tokenization import TokenRoutes
from epdd.frontend.context import Context
from epdd.frontend.http import error_responses, request_ids
from epdd.frontend.http.body import Bodies
from epdd.frontend.http.cors import Cors
from epdd.frontend.images.media import Media
from epdd.frontend.structured.grammar_checker import GrammarChecker
from epdd.frontend.text.prompt import PromptMaker
from epdd.ops.metrics import RequestStats

_HTTP_LOG = logging.getLogger("aiohttp.server")
_THREADS = 2    # for large images and long prompts: the cores belong to the workers


def build(context: Context) -> web.Application:
    """The application; run it with handler_cancellation=True, so that a client that leaves cancels its request.

    Call it inside the running loop.  Raises ConfigError on a bad allowlist.
    """
    _HTTP_LOG.addFilter(_is_server_fault)
    config = context.config
    executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="frontend")
    prompts = PromptMaker(context.family, context.prompts, executor, config.model.reasoning == "auto")
    vocabulary = Vocabulary(prompts.tokenizer)
    checker = GrammarChecker()
    bodies = Bodies(config.server.max_body_bytes, config.media.max_inflight_bytes, config.server.body_timeout_s)
    context.connections.evict_body = bodies.evict
    media = Media(config.media, context.family, executor)
    context.stats.gauges.update(images=lambda: media.budget.used, bodies=lambda: bodies.held)
    guard, cors = context.keys, Cors(config.server.cors_origins)
    app = web.Application(middlewares=[_errors(context.stats), cors.middleware(), guard.middleware()])
    app.on_response_prepare.extend((_mark, cors.mark))

    async def expect(request: web.Request) -> web.StreamResponse | None:
        """`Expect: 100-continue`: a request without a key, or too large, is refused before its body is sent."""
        try:
            guard.check(request)
        except Unauthorized as error:
            return error_responses.response(error)
        return await bodies.expect(request)

    async def lifetime(app: web.Application) -> AsyncIterator[None]:
        yield
        await media.close()
        await checker.close()
        executor.shutdown(wait=False, cancel_futures=True)

    app.cleanup_ctx.append(lifetime)
    chat = ChatCompletions(context, bodies, media, prompts, vocabulary, checker, executor)
    text = TextCompletions(context, bodies, prompts, vocabulary, checker, executor)
    tokens = TokenRoutes(context, bodies, media, prompts, executor)
    for path, endpoint in (("/chat/completions", chat.answer), ("/completions", text.answer),
                           ("/tokenize", tokens.tokenize), ("/detokenize", tokens.detokenize)):
        for prefix in ("/v1", ""):
            app.router.add_post(prefix + path, endpoint, expect_handler=expect)
    pages = SystemRoutes(context, guard)
    for path, page in (("/v1/models", pages.models), ("/v1/models/{name:.+}", pages.model),
                       ("/health", pages.health), ("/ready", pages.ready), ("/ping", pages.ping),
                       ("/version", pages.version), ("/metrics", pages.metrics),
                       ("/openapi.json", pages.openapi)):
        app.router.add_get(path, page)
    chat_page.add(app.router, context)
    return app


def _is_server_fault(record: logging.LogRecord) -> bool:
    """False for bytes that cannot be parsed: they get a 400 before any middleware, and aiohttp would log them, with an
    API key for example."""
    return not (record.exc_info and isinstance(record.exc_info[1], (HttpProcessingError, web.RequestPayloadError)))


def _errors(stats: RequestStats) -> Middleware:
    """Every failure becomes an answer in the API's envelope, and every answer is counted."""

    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = error_responses.of_http(error, request.method, request.path)
        except Exception as error:
            fault = error_responses.known(error, request_ids.logged(request))
            stats.errors[fault.code] += 1
            response = error_responses.response(fault)
        stats.statuses[response.status] += 1
        return response

    return errors


async def _mark(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request_ids.shown(request)
    response.headers["Server"] = "epdd"
