"""`POST /v1/chat/completions`, from the body to the last token."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import orjson
from aiohttp import web

from epdd.dispatch.request import Request
from epdd.errors import BadRequest, TooLarge, WorkerTimeout
from epdd.frontend import answers, faults, openai
from epdd.frontend.context import Context
from epdd.frontend.media import Media
from epdd.frontend.metrics import Record
from epdd.frontend.prompt import PromptMaker
from epdd.frontend.sse import ClientGone, EventStream
from epdd.frontend.text import Vocabulary


BODY_BYTES_MAX = web.AppKey("body_bytes_max", int)


class ChatCompletions:
    """The endpoint's handler."""

    def __init__(self, context: Context, media: Media, prompts: PromptMaker) -> None:
        self._context = context
        self._media = media
        self._prompts = prompts
        self._vocabulary = Vocabulary(prompts.tokenizer)

    async def __call__(self, http: web.Request) -> web.StreamResponse:
        deadline = asyncio.get_running_loop().time() + self._context.config.server.timeout_s
        with self._context.stats.request() as record, self._context.admission.enter():
            record.accept()
            async with AsyncExitStack() as stack:
                async with _until(deadline):
                    chat, request = await self._prepare(http, stack, deadline)
                record.prompt(len(request.tokens), len(request.images), len(chat.unknown))
                respond = self._stream if chat.stream else self._whole
                return await respond(http, chat, request, record)

    async def _prepare(self, http: web.Request, stack: AsyncExitStack, deadline: float
                       ) -> tuple[openai.Chat, Request]:
        """Everything that can be known before the first worker is asked.  The images' bytes stay reserved
        until `stack` closes; body and messages are let go here."""
        context = self._context
        body = await _read(http, context.config.server.body_bytes_max)
        chat, conversation = openai.parse(body, context.family, context.model_name)
        del body
        images = await stack.enter_async_context(
            self._media.images(conversation.images, chat.min_pixels, chat.max_pixels))
        context_max = context.context_max()
        prompt = await self._prompts.make(conversation, images, context_max)
        sampling = prompt.limit(chat.sampling, context_max)
        request = Request(id=own_id(http), tokens=prompt.tokens, sampling=sampling, images=images,
                          spans=prompt.spans, n=chat.n, deadline=deadline)
        context.admission.check(request)
        return chat, request

    async def _whole(self, http: web.Request, chat: openai.Chat, request: Request, record: Record) -> web.Response:
        found = answers.Answers(chat, request, self._vocabulary)
        whole = answers.Whole(chat, request.n)
        async with aclosing(self._deltas(request, found, record)) as deltas, _until(request.deadline):
            async for delta in deltas:
                whole.add(delta)
        return web.Response(body=orjson.dumps(whole.body(self._head(request), found.usage())),
                            content_type="application/json")

    async def _stream(self, http: web.Request, chat: openai.Chat, request: Request, record: Record
                      ) -> web.StreamResponse:
        found = answers.Answers(chat, request, self._vocabulary)
        chunks = answers.Chunks(chat, self._head(request), found.usage)
        stream = EventStream(http)
        try:
            async with aclosing(self._deltas(request, found, record)) as deltas, _until(request.deadline):
                async for delta in deltas:
                    for chunk in chunks.of(delta):
                        await stream.send(chunk)
                for chunk in chunks.last():
                    await stream.send(chunk)
                return await stream.end()
        except ClientGone:
            record.abort()
            return stream.response
        except Exception as error:
            if not stream.begun:
                raise
            record.fail()
            return await stream.fail(faults.envelope(faults.known(error, request.id)))

    async def _deltas(self, request: Request, found: answers.Answers, record: Record
                      ) -> AsyncGenerator[answers.Delta, None]:
        """Ends when every choice has; closing the pipeline then stops choices that only a stop string ended."""
        async with aclosing(self._context.pipeline.run(request)) as events:
            async for event in events:
                before = found.generated
                delta = found.push(event)
                if delta is not None:
                    record.tokens(delta.index, found.generated - before)
                    yield delta
                if found.done:
                    break

    def _head(self, request: Request) -> dict[str, object]:
        return answers.head(request.id, int(time.time()), self._context.model_name)


def own_id(http: web.Request) -> str:
    """The request's id inside the daemon.  The client's X-Request-ID is none: two requests may carry the same."""
    found: str = http.setdefault("epdd_id", f"chatcmpl-{uuid.uuid4().hex}")
    return found


async def expect(http: web.Request) -> web.StreamResponse | None:
    """Answer `Expect: 100-continue`; a body that is too large is refused before it is sent."""
    most = http.app[BODY_BYTES_MAX]
    if (http.content_length or 0) > most:
        return faults.response(_too_large(most))
    await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # aiohttp takes bytes written for a begun response, after which it could not send another.
    http.writer.output_size = 0
    return None


async def _read(http: web.Request, most: int) -> bytearray:
    """The body.  Not by `http.read()`, which keeps it as long as the request lives.

    Raises TooLarge as soon as it is known, BadRequest if the transfer is damaged.
    """
    body = bytearray()
    if (http.content_length or 0) > most:
        raise _too_large(most)
    try:
        async for piece in http.content.iter_any():
            body += piece
            if len(body) > most:
                raise _too_large(most)
    except web.RequestPayloadError:
        raise BadRequest("The body could not be read") from None
    return body


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"The body is over the limit of {most} bytes")


@asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    """`deadline` in the loop's time.  Raises WorkerTimeout after it."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise WorkerTimeout("The request was not finished within the server's time limit") from None
