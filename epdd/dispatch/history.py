"""What became of the last requests: where each image went and why, the PD worker, and when.  For `epdctl explain`.

The pipeline tells it a request's way, `Encoding` what it decides.  Nothing here decides anything, and no prompt,
pixel or answer is kept.

Kept are the requests in flight (admission bounds them) and the last REQUESTS_MAX that ended, with IMAGES_MAX
images together: about 11 MB when full, 1.3 MB when each request had one image.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from epdd.dispatch.encoder_cache.cache import EncoderCacheEntry
from epdd.dispatch.request import Request
from epdd.errors import EpddError, NotFound, WorkerTimeout
from epdd.fleet.channel import WorkEvent
from epdd.wire import Encoded, Failed

REQUESTS_MAX = 1024
IMAGES_MAX = 16 * REQUESTS_MAX      # media.max_images may be set higher: then fewer requests are kept
QUOTED_CHARS_MAX = 200              # of an id or a fault that is repeated
TIMER_S = 0.01                      # a loop's timer may be early by its resolution

ENCODED, CACHE, JOINED, REPEATED = "encoded", "cache", "joined", "repeated"


@dataclass(slots=True)
class HandOver:
    """An image given to an encoder; times are of the history's clock."""

    worker: str
    reason: str                     # the router's
    at: float
    waited_s: float                 # in the queue
    predicted_s: float              # by the worker's time model
    outcome: str = "running"        # then encoded, failed, cancelled or lost (with its worker)
    seconds: float | None = None    # that it took, by the worker's clock
    error: str = ""
    ended: float | None = None

    def end(self, event: WorkEvent, now: float) -> None:
        self.ended = now
        if isinstance(event, Encoded):
            self.outcome, self.seconds = "encoded", event.seconds
        elif isinstance(event, (Failed, EpddError)):
            self.outcome = "failed" if isinstance(event, Failed) else "lost"
            self.error = event.message[:QUOTED_CHARS_MAX]
        else:
            self.outcome = "cancelled"


@dataclass(slots=True)
class _Image:
    patches: int
    source: str = CACHE
    # A request that lost its PD worker may need an encoding twice.  Each list is the encoding's own: it is the
    # same for all requests that wait for it, and grows when the image is placed again.
    encodings: list[list[HandOver]] = field(default_factory=list)
    embedding: EncoderCacheEntry | None = None      # while the request is in flight
    error: str = ""


@dataclass(slots=True)
class _Placement:
    """One try on a PD worker."""

    worker: str
    at: float
    prefilled: float | None = None
    error: str = ""


class RequestTrace:
    """One request, as it goes."""

    def __init__(self, request: Request, encodings: WeakKeyDictionary[EncoderCacheEntry, list[HandOver]],
                 clock: Callable[[], float]) -> None:
        self.id = request.id
        self.client_id = request.client_id
        self.outcome = "running"            # then completed, failed or aborted
        self.code = self.error = ""         # of the failure
        self.answered = False
        self.images = [_Image(image.patches) for image in request.images]
        self._tokens = len(request.tokens)
        self._arrived = request.arrived
        self._encodings = encodings
        self._clock = clock
        self._began = clock()
        self._embedded: float | None = None
        self._ended: float | None = None
        self._placements: list[_Placement] = []

    def leased(self, embeddings: Sequence[EncoderCacheEntry], fresh: Sequence[EncoderCacheEntry]) -> None:
        """Every image has its place; those in `fresh` are encoded for this request, the others are or will be there."""
        seen = set()
        for image, embedding in zip(self.images, embeddings):
            image.embedding = embedding
            if not embedding.ready:
                image.source = REPEATED if embedding in seen else ENCODED if embedding in fresh else JOINED
                image.encodings.append(self._encodings.setdefault(embedding, []))
                seen.add(embedding)

    def embedded(self) -> None:
        """All embeddings are ready."""
        self._embedded = self._clock()

    def placed(self, worker: str) -> None:
        """A PD worker was chosen."""
        self._placements.append(_Placement(worker, self._clock()))

    def prefilled(self) -> None:
        """The PD worker has read the prompt of every choice."""
        self._placements[-1].prefilled = self._clock()

    def lost(self, error: EpddError) -> None:
        """The PD worker was lost; the request is placed again."""
        if self._placements and not self._placements[-1].error:     # or it was an encoder, in the second try
            self._placements[-1].error = error.message[:QUOTED_CHARS_MAX]

    def fail(self, error: EpddError) -> None:
        self.outcome, self.code, self.error = "failed", error.code, error.message[:QUOTED_CHARS_MAX]

    def end(self) -> None:
        self._ended = self._clock()
        for image in self.images:
            if image.embedding is not None and image.embedding.failure is not None:
                image.error = image.embedding.failure.message[:QUOTED_CHARS_MAX]
            image.embedding = None          # with it would stay the image's bytes

    def summary(self) -> dict[str, Any]:
        """One line of the list."""
        now = self._clock()
        return {"id": self.id, "client_id": self.client_id, "age_s": now - self._arrived, "tokens": self._tokens,
                "outcome": self.outcome, "code": self.code, "images_count": len(self.images),
                "seconds": (now if self._ended is None else self._ended) - self._arrived,
                "pd": self._placements[-1].worker if self._placements else None}

    def explain(self) -> dict[str, Any]:
        """All that is known; times ending in `_at_s` are seconds since the request's arrival, None: not (yet)."""
        prefilled = self._placements[-1].prefilled if self._placements else None
        return self.summary() | {
            "error": self.error, "began_at_s": self._since(self._began), "embedded_at_s": self._since(self._embedded),
            "prefilled_at_s": self._since(prefilled), "ended_at_s": self._since(self._ended),
            "images": [{"patches": image.patches, "source": image.source, "error": image.error,
                        "hand_overs": [self._told(each) for each in chain.from_iterable(image.encodings)]}
                       for image in self.images],
            "placements": [{"worker": each.worker, "placed_at_s": self._since(each.at), "error": each.error,
                            "prefilled_at_s": self._since(each.prefilled)} for each in self._placements]}

    def _told(self, each: HandOver) -> dict[str, Any]:
        return {"worker": each.worker, "reason": each.reason, "handed_over_at_s": self._since(each.at),
                "waited_s": each.waited_s, "predicted_s": each.predicted_s, "seconds": each.seconds,
                "outcome": each.outcome, "error": each.error, "ended_at_s": self._since(each.ended)}

    def _since(self, at: float | None) -> float | None:
        return None if at is None else at - self._arrived


class History:
    """The requests in flight and the last that ended.  All calls come from the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, RequestTrace] = {}
        self._ended: deque[RequestTrace] = deque()
        self._images = 0                    # of those that ended
        # Of encodings that are not finished.  By embedding, not by its key: an image that is wanted again while
        # its cancelled encoding still ends has two at once.
        self._encodings: WeakKeyDictionary[EncoderCacheEntry, list[HandOver]] = WeakKeyDictionary()

    @contextmanager
    def record(self, request: Request) -> Iterator[RequestTrace]:
        """The request's life in dispatch; how the block ends says how the request did."""
        trace = self._running[request.id] = RequestTrace(request, self._encodings, self._clock)
        try:
            yield trace
            trace.outcome = "completed"
        except EpddError as error:
            trace.fail(error)
            raise
        except Exception as error:
            trace.fail(EpddError(f"a bug: {type(error).__name__}"))
            raise
        except BaseException:               # closed or cancelled from outside
            trace.outcome = "completed" if trace.answered else "aborted"
            if request.deadline and asyncio.get_running_loop().time() >= request.deadline - TIMER_S:
                trace.fail(WorkerTimeout("the request was not finished before its deadline"))
            raise
        finally:
            trace.end()
            self._running.pop(request.id, None)
            self._keep(trace)

    def _keep(self, trace: RequestTrace) -> None:
        self._ended.append(trace)
        self._images += len(trace.images)
        while len(self._ended) > REQUESTS_MAX or self._images > IMAGES_MAX:
            self._images -= len(self._ended.popleft().images)

    def answered(self, request_id: str) -> None:
        """Its answer is whole, so that closing the pipeline now is no abort."""
        if request_id in self._running:
            self._running[request_id].answered = True

    def handed_over(self, embedding: EncoderCacheEntry, worker: str, reason: str, waited_s: float,
                    predicted_s: float) -> None:
        """The router's decision; `waited_s` since the image was queued, `predicted_s` by the worker's time model."""
        before, now = self._encodings.setdefault(embedding, []), self._clock()
        if before and before[-1].ended is not None:
            waited_s = now - before[-1].ended       # placed again: it did not wait while a worker had it
        before.append(HandOver(worker, reason, now, waited_s, predicted_s))

    def encoding_ended(self, embedding: EncoderCacheEntry, event: WorkEvent) -> None:
        """The worker's last word on an image that was handed over."""
        self._encodings[embedding][-1].end(event, self._clock())

    def last(self) -> list[dict[str, Any]]:
        """A summary of each request, the latest first."""
        return [trace.summary() for trace in self._latest_first()]

    def explain(self, name: str) -> dict[str, Any]:
        """A request by the answer's id, whole or without its kind, or by the x-request-id its client gave: the latest.

        Raises NotFound.
        """
        for trace in self._latest_first():
            if name and name in (trace.id, trace.id.partition("-")[2], trace.client_id):
                return trace.explain()
        raise NotFound(f"no request {name[:QUOTED_CHARS_MAX]!r} among those running and the last {REQUESTS_MAX}; "
                       "one that was refused before any worker was asked is not kept")

    def _latest_first(self) -> Iterator[RequestTrace]:
        yield from reversed(self._running.values())
        yield from reversed(self._ended)
