"""`POST /v1/chat/completions`, from the body to the last token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

import orjson
from aiohttp import web

from epdd.dispatch.request import Request
from epdd.errors import WorkerTimeout
from epdd.frontend import faults, ids, openai
from epdd.frontend.answers import Answers, Chunks, Delta, Whole
from epdd.frontend.body import Bodies
from epdd.frontend.context import Context
from epdd.frontend.media import Held, Media
from epdd.frontend.metrics import Record
from epdd.frontend.prompt import PromptMaker
from epdd.frontend.sse import ClientGone, EventStream
from epdd.frontend.text import Vocabulary
from epdd.wire import Tokens


@dataclass(frozen=True)
class _Turn:
    """One request that is ready to be answered."""

    http: web.Request
    chat: openai.Chat
    request: Request
    held: Held
    record: Record
    answers: Answers

    @property
    def head(self) -> dict[str, object]:
        """What a completion and all of its chunks have in common."""
        return {"id": self.request.id, "created": int(time.time()), "model": self.chat.model}


class ChatCompletions:
    """The endpoint's handler."""

    def __init__(self, context: Context, media: Media, prompts: PromptMaker) -> None:
        limits = context.config
        self.bodies = Bodies(limits.server.body_bytes_max, limits.media.inflight_bytes_max)
        self._context = context
        self._media = media
        self._prompts = prompts
        self._vocabulary = Vocabulary(prompts.tokenizer)

    async def __call__(self, http: web.Request) -> web.StreamResponse:
        timeout_s = self._context.config.server.timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s if timeout_s else 0.0
        with self._context.stats.request() as record, self._context.admission.enter():
            record.accept()
            async with AsyncExitStack() as stack:
                turn = await self._prepare(http, record, deadline, stack)
                return await (self._stream(turn) if turn.chat.stream else self._whole(turn))

    async def _prepare(self, http: web.Request, record: Record, deadline: float, stack: AsyncExitStack) -> _Turn:
        """Everything that can be known before a worker is asked.  Body and messages are let go here; the
        images' bytes stay reserved until `stack` closes at the latest."""
        context = self._context
        async with _until(deadline), AsyncExitStack() as reading:
            body = await self.bodies.read(http, reading)
            chat, conversation = openai.parse(body, context.family, context.model_name)
            del body
            held = await stack.enter_async_context(
                self._media.images(conversation.images, chat.min_pixels, chat.max_pixels))
            context_max = context.context_max()
            prompt = await self._prompts.make(conversation, held.images, context_max)
            request = Request(id=ids.own(http), tokens=prompt.tokens, sampling=prompt.limit(chat.sampling, context_max),
                              images=held.images, spans=prompt.spans, n=chat.n, deadline=deadline,
                              arrived=record.arrived, client_id=ids.client(http))
            context.admission.check(request)
            record.prompt(len(request.tokens), len(request.images), len(chat.unknown))
            return _Turn(http, chat, request, held, record, Answers(chat, request, self._vocabulary))

    async def _whole(self, turn: _Turn) -> web.Response:
        whole = Whole(turn.chat)
        async with _until(turn.request.deadline), aclosing(self._deltas(turn)) as deltas:
            async for delta in deltas:
                whole.add(delta)
        body = whole.body(turn.head, turn.answers.usage())
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def _stream(self, turn: _Turn) -> web.StreamResponse:
        chunks = Chunks(turn.chat, turn.head, turn.answers.usage)
        stream = EventStream(turn.http)
        try:
            async with _until(turn.request.deadline), aclosing(self._deltas(turn)) as deltas:
                async for delta in deltas:
                    for chunk in chunks.of(delta):
                        await stream.send(chunk)
                for chunk in chunks.last():
                    await stream.send(chunk)
                return await stream.end()
        except ClientGone:
            turn.record.abort()
            return stream.response
        except Exception as error:
            if not stream.begun:
                raise
            fault = faults.known(error, ids.logged(turn.http))
            turn.record.fail(fault.code)
            return await stream.fail(faults.envelope(fault))

    async def _deltas(self, turn: _Turn) -> AsyncGenerator[Delta, None]:
        """Ends with the last choice; closing the pipeline stops those that only a stop string ended."""
        async with aclosing(self._context.pipeline.run(turn.request)) as events:
            async for event in events:
                if isinstance(event[1], Tokens):
                    # The images were encoded, and a request with a token is not tried a second time.
                    turn.held.let_go()
                before = turn.answers.generated
                delta = turn.answers.push(event)
                if delta is not None:
                    turn.record.tokens(delta.index, turn.answers.generated - before)
                    yield delta
                if turn.answers.cut_short:
                    self._context.history.answered(turn.request.id)
                    break
        assert turn.answers.ended, "the pipeline ended before its last Done"


@asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    """`deadline` in the loop's time, 0 for none.  Raises WorkerTimeout after it."""
    try:
        async with asyncio.timeout_at(deadline or None):
            yield
    except TimeoutError:
        raise WorkerTimeout("The request was not finished within the server's time limit") from None
