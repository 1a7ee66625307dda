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
from epdd.frontend.media import Held, Media
from epdd.frontend.metrics import Record
from epdd.frontend.prompt import PromptMaker
from epdd.frontend.sse import ClientGone, EventStream
from epdd.frontend.text import Vocabulary
from epdd.wire import Tokens


_OWN_ID = web.RequestKey("own_id", str)
_Deltas = AsyncGenerator[answers.Delta, None]

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
                    chat, request, held = await self._prepare(http, stack, deadline)
                record.prompt(len(request.tokens), len(request.images), len(chat.unknown))
                found = answers.Answers(chat, request, self._vocabulary)
                deltas = self._deltas(request, found, record, held)
                if chat.stream:
                    return await self._stream(http, chat, request, found, deltas, record)
                return await self._whole(chat, request, found, deltas)

    async def _prepare(self, http: web.Request, stack: AsyncExitStack, deadline: float
                       ) -> tuple[openai.Chat, Request, Held]:
        """Everything that can be known before the first worker is asked.  The images' bytes stay reserved
        until `stack` closes at the latest; body and messages are let go here."""
        context = self._context
        body = await _read(http, context.config.server.body_bytes_max)
        chat, conversation = openai.parse(body, context.family, context.model_name)
        del body
        held = await stack.enter_async_context(
            self._media.images(conversation.images, chat.min_pixels, chat.max_pixels))
        context_max = context.context_max()
        prompt = await self._prompts.make(conversation, held.images, context_max)
        sampling = prompt.limit(chat.sampling, context_max)
        request = Request(id=own_id(http), tokens=prompt.tokens, sampling=sampling, images=held.images,
                          spans=prompt.spans, n=chat.n, deadline=deadline)
        context.admission.check(request)
        return chat, request, held

    async def _whole(self, chat: openai.Chat, request: Request, found: answers.Answers, deltas: _Deltas
                     ) -> web.Response:
        whole = answers.Whole(chat, request.n)
        async with aclosing(deltas), _until(request.deadline):
            async for delta in deltas:
                whole.add(delta)
        return web.Response(body=orjson.dumps(whole.body(self._head(request), found.usage())),
                            content_type="application/json")

    async def _stream(self, http: web.Request, chat: openai.Chat, request: Request, found: answers.Answers,
                      deltas: _Deltas, record: Record) -> web.StreamResponse:
        chunks = answers.Chunks(chat, self._head(request), found.usage)
        stream = EventStream(http)
        try:
            async with aclosing(deltas), _until(request.deadline):
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

    async def _deltas(self, request: Request, found: answers.Answers, record: Record, held: Held) -> _Deltas:
        """Ends with the last choice; closing the pipeline stops those that only a stop string ended."""
        async with aclosing(self._context.pipeline.run(request)) as events:
            async for event in events:
                before = found.generated
                delta = found.push(event)
                if isinstance(event[1], Tokens):
                    # The images were encoded, and a request with a token is not tried a second time.
                    held.let_go()
                if delta is not None:
                    record.tokens(delta.index, found.generated - before)
                    yield delta
                if found.cut_short:
                    break

    def _head(self, request: Request) -> dict[str, object]:
        return answers.head(request.id, int(time.time()), self._context.model_name)


def own_id(http: web.Request) -> str:
    """The request's id inside the daemon.  The client's X-Request-ID is none: two requests may carry the same."""
    if _OWN_ID not in http:
        http[_OWN_ID] = f"chatcmpl-{uuid.uuid4().hex}"
    return http[_OWN_ID]


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
