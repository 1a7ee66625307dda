"""The part that both completion endpoints share: answering a prepared request, whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import orjson
from aiohttp import web

from epdd.dispatch.pipeline import Restarted
from epdd.dispatch.request import Request
from epdd.dispatch.request_record import RequestRecord
from epdd.errors import WorkerTimeout
from epdd.families.vocabulary import Vocabulary
from epdd.frontend.api.answers import Answers, Chunks, Delta, Whole, total_usage
from epdd.frontend.context import Context
from epdd.frontend.http import error_responses, request_ids
from epdd.frontend.http.body import Bodies
from epdd.frontend.http.sse import ClientGone, EventStream
from epdd.frontend.images.media import HeldImages
from epdd.frontend.requests import request_validation
from epdd.frontend.requests.completion_requests import Options
from epdd.frontend.requests.inline_files import InlineLimits
from epdd.frontend.structured import bad_words, structured_output
from epdd.frontend.structured.grammar_checker import GrammarChecker
from epdd.frontend.text.prompt import Prompt, PromptMaker
from epdd.wire import Sampling, Tokens


T = TypeVar("T")

INLINE_BYTES = 64 << 10     # of JSON, parsed in a millisecond or two
_AT_ONCE = 32               # deltas of a whole answer that are handled before other tasks may run


@dataclass(frozen=True)
class PromptRun:
    """One prompt of a request, and its answers."""

    request: Request
    answers: Answers


@dataclass(frozen=True)
class PreparedRequest:
    """A validated request with its prompts, ready for the workers."""

    http: web.Request
    options: Options
    parts: Sequence[PromptRun]
    record: RequestRecord
    deadline: float                         # loop.time(); 0: none
    held: HeldImages | None = None                # its images

    def images_read(self) -> None:
        """A token came.  A non-streamed answer may still need its images for a retry."""
        if self.held is not None:
            if self.options.stream:
                self.held.release()
            else:
                self.held.offer()

    def images_needed(self) -> None:
        """The retry begins."""
        if self.held is not None:
            self.held.keep()

    @property
    def head(self) -> dict[str, object]:
        """Fields that a completion and all of its chunks share."""
        return {"id": request_ids.own(self.http), "created": int(time.time()), "model": self.options.model}

    def usage(self) -> dict[str, Any]:
        return total_usage([part.answers.usage() for part in self.parts])


class Completions(ABC):
    """An endpoint's handler."""

    kind: str                           # prefix of the ids of its answers
    whole: type[Whole] = Whole
    chunks: type[Chunks] = Chunks

    def __init__(self, context: Context, bodies: Bodies, prompts: PromptMaker, vocabulary: Vocabulary,
                 checker: GrammarChecker, executor: Executor) -> None:
        self._context = context
        self._bodies = bodies
        self._prompts = prompts
        self._vocabulary = vocabulary
        self._checker = checker
        self._executor = executor
        self._limits = limits_of(context)

    async def answer(self, http: web.Request) -> web.StreamResponse:
        deadline = deadline_of(self._context)
        names = request_ids.own(http, self.kind), request_ids.client(http)
        with self._context.stats.request(*names) as record:
            self._context.admission.check_load()      # before its body is read
            async with AsyncExitStack() as stack:
                async with until(deadline):
                    prepared = await self._prepare(http, record, deadline, stack)
                record.model = prepared.options.model
                return await (self._stream(prepared) if prepared.options.stream else self._whole(prepared))

    async def _ready(self, prompt: Prompt, options: Options) -> tuple[Prompt, Sampling]:
        """The prompt, truncated if asked, and its sampling.  Raises BadRequest or ContextLength."""
        max_model_len = self._context.max_model_len()
        prompt = prompt.cut(options.truncate, options.sampling, max_model_len)
        sampling = prompt.limit(options.sampling, max_model_len)
        if options.bad_words:
            steps = await asyncio.get_running_loop().run_in_executor(
                self._executor, bad_words.steps, options.bad_words, self._vocabulary)
            sampling = msgspec.structs.replace(sampling, bad_words=steps)
        return prompt, sampling

    async def _body(self, http: web.Request, reading: AsyncExitStack, stack: AsyncExitStack) -> bytearray:
        """The body, held until `reading` closes.  Once it is complete the request counts as admitted, until `stack`
        closes: half a body must not take another request's place.
        """
        body = await self._bodies.read(http, reading)
        stack.enter_context(self._context.admission.admit())
        self._context.stats.counts["accepted"] += 1
        return body

    async def _parsed(self, kind: type[msgspec.Struct], understand: Callable[..., T], body: bytearray) -> T:
        """The result of `understand`, a function of `completion_requests.py`, for a body."""
        context, size = self._context, len(body)
        asked, ignored = await off_loop(self._executor, size, request_validation.parse, body, kind,
                                        context.config.server.strict, self._limits)
        if structured_output.wanted(asked):
            size = INLINE_BYTES + 1
        return await off_loop(self._executor, size, understand, asked, ignored, context.family, context.model_names)

    @abstractmethod
    async def _prepare(self, http: web.Request, record: RequestRecord, deadline: float, stack: AsyncExitStack
                       ) -> PreparedRequest:
        """Everything before the first worker is involved.  `stack` closes when the answer is sent."""

    async def _whole(self, prepared: PreparedRequest) -> web.Response:
        whole = self.whole(prepared.options, prepared.options.n * len(prepared.parts))
        async with until(prepared.deadline), aclosing(self._deltas(prepared)) as deltas:
            async for delta in deltas:
                whole.add(delta)
        body = whole.body(prepared.head, prepared.usage())
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def _stream(self, prepared: PreparedRequest) -> web.StreamResponse:
        chunks = self.chunks(prepared.options, prepared.head, prepared.usage)
        stream = EventStream(prepared.http)
        try:
            async with until(prepared.deadline), aclosing(self._deltas(prepared)) as deltas:
                async for delta in deltas:
                    for chunk in chunks.of(delta):
                        await stream.send(chunk)
                for chunk in chunks.last():
                    await stream.send(chunk)
                return await stream.end()
        except ClientGone:
            prepared.record.abort()
            return stream.response
        except Exception as error:
            if not stream.begun:
                raise
            fault = error_responses.known(error, request_ids.logged(prepared.http))
            self._context.stats.broken(prepared.record, fault.code)
            return await stream.fail(error_responses.envelope(fault))

    def _deltas(self, prepared: PreparedRequest) -> AsyncGenerator[Delta, None]:
        """Of all prompts, with choices numbered across them."""
        streams = [self._part(prepared, part, index * prepared.options.n) for index, part in enumerate(prepared.parts)]
        return streams[0] if len(streams) == 1 else _merged(streams)

    async def _part(self, prepared: PreparedRequest, part: PromptRun, first: int) -> AsyncGenerator[Delta, None]:
        """Ends with the last choice; closing the pipeline stops choices that a stop string ended.

        A non-streamed answer's deltas all come at its end: until then it may start again.
        """
        answers, kept = part.answers, list[Delta]()
        async with aclosing(self._context.pipeline.run(part.request)) as events:
            async for event in events:
                index, message = event
                if isinstance(message, Restarted):
                    prepared.images_needed()
                    answers.begin()
                    kept.clear()
                    continue
                if isinstance(message, Tokens):
                    prepared.images_read()
                before = answers.generated
                delta = answers.push((index, message))
                if delta is not None:
                    delta = replace(delta, index=first + index) if first else delta
                    self._context.stats.tokens(prepared.record, delta.index, answers.generated - before)
                    if delta.finish_reason:
                        prepared.record.finish_reasons[delta.index] = delta.finish_reason
                    if part.request.whole:
                        kept.append(delta)
                    else:
                        yield delta
                if answers.cut_short:
                    part.request.record.answered = True
                    break
        assert answers.ended, "the pipeline ended before its last Done"
        for count, delta in enumerate(kept):
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)      # a long answer with logprobs takes half a second
            yield delta


async def _merged(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """The streams' items as they come.  Ends with the last stream, or with the first error."""
    # Not a task group: it would cancel this generator's reader at any of its own awaits.
    ready: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(1)

    async def feed(stream: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    await ready.put(delta)
        except Exception as error:
            await ready.put(error)
        else:
            await ready.put(None)

    tasks = [asyncio.create_task(feed(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def off_loop(executor: Executor, size: int, work: Callable[..., T], *args: Any) -> T:
    """`work(*args)`, in a thread if `size`, of its input in bytes, is over INLINE_BYTES."""
    if size <= INLINE_BYTES:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(executor, work, *args)


def limits_of(context: Context) -> InlineLimits:
    """Limits of a body's text and images."""
    return InlineLimits.of(context.family.max_model_len, context.config.media.max_file_bytes)


def deadline_of(context: Context) -> float:
    """loop.time() by which a request that arrives now must be answered; 0: no limit."""
    timeout_s = context.config.server.timeout_s
    return asyncio.get_running_loop().time() + timeout_s if timeout_s else 0.0


@asynccontextmanager
async def until(deadline: float) -> AsyncIterator[None]:
    """`deadline` in the loop's time, 0 for none.  Raises WorkerTimeout after it."""
    try:
        async with asyncio.timeout_at(deadline or None):
            yield
    except TimeoutError:
        raise WorkerTimeout("The request was not finished within the server's time limit (server.timeout_s)") from None
