"""One request: encoder cache entries for its images, encoding, then prefill and decode; one way to cancel."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from epdd.dispatch.admission import Admission
from epdd.dispatch.crash_policy import Attempts, Isolation
from epdd.dispatch.encoder_cache.cache import EncoderCacheEntry, EncoderCache
from epdd.dispatch.encoding import Encoding
from epdd.dispatch.history import History
from epdd.dispatch.prefix_affinity import PrefixAffinity, chain
from epdd.dispatch.request import Request
from epdd.errors import EpddError, NoWorker, WorkerFailed, WorkerLost, WorkerTimeout, from_wire
from epdd.fleet.channel import Work, WorkEvent
from epdd.fleet.supervisor import Supervisor
from epdd.fleet.worker import Worker
from epdd.wire import Cancelled, Done, Encoded, Failed, Generate, Prefilled, Span, Tokens

log = logging.getLogger(__name__)

# Limit of an answer's cost when a worker is chosen, in tokens: max_tokens is often the whole rest of the context.
ANSWER_TOKENS = 512
# Limit of tokens that wait for a slow client, for each choice on average; with 20 log probabilities each, 5 MB.
UNREAD_MAX = 4096


class Restarted:
    """All choices start again: drop the tokens received so far."""


Answer = tuple[int, Prefilled | Tokens | Done]


class Pipeline:
    """Runs requests; keeps no state of them after their end."""

    def __init__(self, supervisor: Supervisor, cache: EncoderCache, encoding: Encoding, admission: Admission,
                 history: History) -> None:
        self._supervisor = supervisor
        self._cache = cache
        self._encoding = encoding
        self._admission = admission
        self._history = history
        self._prefixes = PrefixAffinity()
        self._changed = asyncio.Event()
        self._crashes = encoding.crashes

    def fleet_changed(self) -> None:
        """A worker's state changed: requests that wait for a worker check again."""
        self._changed.set()
        self._encoding.fleet_changed()

    async def run(self, request: Request) -> AsyncGenerator[Answer | tuple[int, Restarted], None]:
        """(choice index, event) until every choice is Done.  Closing the iterator cancels the rest.

        Raises EpddError: WorkerLost if tokens were sent already or the retry lost its worker too, Rejected if both
        workers crashed.
        """
        attempts = Attempts()
        with self._history.record(request):
            while True:
                isolation, begun = self._crashes.isolation(attempts), False
                attempts.begun += 1
                try:
                    async with aclosing(self._attempt(request, attempts.begun, isolation)) as answers:
                        async for answer in answers:
                            begun = begun or isinstance(answer[1], Tokens)
                            yield answer
                    return
                except WorkerLost as error:
                    request.record.lost(error)
                    self._crashes.prompt_lost(request, attempts, error, begun)
                    log.warning("%s is retried: %s", request.id, error.message)
                if begun:
                    yield 0, Restarted()

    async def _attempt(self, request: Request, attempt: int, isolation: Isolation
                       ) -> AsyncGenerator[Answer, None]:
        embeddings: list[EncoderCacheEntry] = []
        try:
            self._crashes.check(request)
            async with _Deadline(request.deadline):
                if request.images:
                    embeddings = await self._embed(request)
                await isolation.begin()
                worker, known = await self._pd_worker(request, embeddings)
            request.record.placed(worker.name)
            async with aclosing(self._generate(request, attempt, worker, known, embeddings)) as answers:
                async for answer in answers:
                    if isinstance(answer[1], Tokens):
                        isolation.end()
                    yield answer
        finally:
            isolation.end()
            self._release(embeddings)

    def _release(self, embeddings: list[EncoderCacheEntry]) -> None:
        """Release each entry once; images that no other request needs are not encoded any more."""
        while embeddings:
            embedding = embeddings.pop()
            self._cache.release(embedding)
            if embedding.ref_count == 0 and not embedding.ready:
                self._encoding.abandon(embedding)

    async def _embed(self, request: Request) -> list[EncoderCacheEntry]:
        """The entries of all images, with embeddings written; the caller releases them."""
        embeddings, fresh = await self._cache.acquire(request.images, self._admission.embedding_sizes(request))
        request.record.acquired([None if each.ready else each.record for each in embeddings],
                                [each.record for each in fresh])
        waits: list[asyncio.Task[None]] = []
        try:
            self._crashes.check(request)    # again: an image may have been rejected during the wait for room
            patches = sum(embedding.image.patches for embedding in fresh)
            for embedding in fresh:
                self._encoding.submit(embedding, request, patches)
            self._encoding.pump()
            waits = [asyncio.create_task(embedding.wait()) for embedding in set(embeddings)]
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            for wait in done:
                wait.result()
        except BaseException:
            self._release(embeddings)
            raise
        finally:
            for wait in waits:
                wait.cancel()
        request.record.embedded()
        return embeddings

    async def _pd_worker(self, request: Request, embeddings: list[EncoderCacheEntry]) -> tuple[Worker, int]:
        """The PD worker that can read the embeddings and has the least to do, and how many prompt tokens it has cached.

        Cached tokens count as work saved.  Waits while a worker restarts.
        """
        transport, digests = self._encoding.transport, chain(request)
        while True:
            transport.check(embeddings)
            workers = self._supervisor.role("pd")
            ready = [worker for worker in workers if worker.takes_work and transport.reads(worker, embeddings)]
            if ready:
                known = {worker: self._prefixes.known(worker, digests) for worker in ready}
                worker = min(ready, key=lambda worker: worker.in_flight_cost - known[worker])
                self._prefixes.add(worker, digests)
                return worker, known[worker]
            if self._supervisor.stopping or not any(worker.comes_back for worker in workers):
                raise NoWorker("no prefill-decode worker is in service")
            transport.give_up_unreadable(embeddings)
            self._changed.clear()
            await self._changed.wait()

    async def _generate(self, request: Request, attempt: int, worker: Worker, known: int,
                        embeddings: list[EncoderCacheEntry]) -> AsyncGenerator[Answer, None]:
        works: list[Work] = []
        events = _Events(works, UNREAD_MAX * request.n)
        loop = asyncio.get_running_loop()
        timer = loop.call_at(request.deadline, events.put_nowait, (0, _late())) if request.deadline else None
        try:
            unpins = []
            for index in range(request.n):
                work_id = f"{request.id}.{attempt}.{index}"
                work, unpin = self._start(request, work_id, index, worker, known, embeddings, events)
                works.append(work)
                unpins.append(unpin)
            open_choices, reading = request.n, request.n
            while open_choices:
                index, event = await events.get()
                answer = _answer(event, worker)
                if isinstance(answer, Prefilled):
                    self._encoding.transport.check(embeddings)
                    unpins[index]()
                    # Decoding runs beside other work, so the prompt does not count any more when a worker is chosen.
                    works[index].cost = _answer_cost(request)
                    reading -= 1
                    if reading == 0:
                        request.record.prefilled()
                        self._release(embeddings)
                elif isinstance(answer, Done):
                    open_choices -= 1
                    worker.done += 1
                else:
                    worker.rate.add(len(answer.ids))
                yield index, answer
        finally:
            if timer is not None:
                timer.cancel()
            events.stop()

    def _start(self, request: Request, work_id: str, index: int, worker: Worker, known: int,
               embeddings: list[EncoderCacheEntry],
               events: _Events) -> tuple[Work, Callable[[], None]]:
        """Hand one choice to a PD worker; also a call that unpins the entries it reads, once."""
        spans = tuple(Span(placed.start, embeddings[placed.image].image.rows, embeddings[placed.image].image.grid,
                           embeddings[placed.image].lease, embeddings[placed.image].dtype,
                           embeddings[placed.image].key, placed.runs) for placed in request.spans)
        sampling = request.sampling
        if index and sampling.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + index)
        tokens = array("i", request.tokens)
        cost = len(tokens) - known + _answer_cost(request)
        pinned = list(embeddings)

        def unpin() -> None:
            while pinned:
                self._cache.unpin(pinned.pop())

        work = worker.start(Generate(work_id, spans, sampling, request.salt, request.tenant), tokens.tobytes(), cost,
                            worker.warm_up_s, lambda event: events.take(index, event))
        for embedding in pinned:
            self._cache.pin(embedding)
        work.on_end(unpin)
        return work, unpin


def _answer_cost(request: Request) -> int:
    return min(request.sampling.max_tokens, ANSWER_TOKENS)


def _answer(event: WorkEvent, worker: Worker) -> Prefilled | Tokens | Done:
    """The event as an answer; raises it if it is an error."""
    if isinstance(event, EpddError):
        raise event
    if isinstance(event, Failed):
        worker.failed += 1
        raise from_wire(event.code, event.message)
    if isinstance(event, (Cancelled, Encoded)):
        raise WorkerFailed(f"{worker.name} answered {type(event).__name__} to a Generate")
    return event


class _Events(asyncio.Queue[tuple[int, WorkEvent]]):
    """(choice index, event) from workers, until the client's handler reads it."""

    def __init__(self, works: list[Work], unread_max: int) -> None:
        super().__init__()
        self._works, self._unread_max = works, unread_max

    def take(self, index: int, event: WorkEvent) -> None:
        """At the limit, cancel the works; the reader gets the error after the events before it."""
        if self.qsize() < self._unread_max:
            self.put_nowait((index, event))
            return
        self.stop()
        self.put_nowait((index, WorkerTimeout(f"the client reads too slowly: {self._unread_max} tokens waited for it")))

    def stop(self) -> None:
        for work in self._works:
            work.mute()
            work.cancel()


def _late() -> WorkerTimeout:
    return WorkerTimeout("the request was not finished before its deadline")


class _Deadline:
    """`async with`: WorkerTimeout instead of TimeoutError; 0 is no deadline."""

    def __init__(self, at: float) -> None:
        self._timeout = asyncio.timeout_at(at or None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self._timeout.__aexit__(*exc)     # type: ignore[arg-type]
        except TimeoutError:
            raise _late() from None
