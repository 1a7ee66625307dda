"""The record of a request: ids, sizes, times, workers and outcome, written once as the request goes along.

The request log, `epdctl explain`, usage and latencies are read from it.  It decides nothing and keeps no prompt, image
or answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from epdd.errors import EpddError
from epdd.fleet.channel import WorkEvent
from epdd.wire import Encoded, Failed

QUOTED_CHARS_MAX = 200              # of an id or an error message that is repeated
_CLIENT_LEFT = 499                  # no answer was sent; nginx logs this status too

ENCODED, CACHE, JOINED, REPEATED = "encoded", "cache", "joined", "repeated"


@dataclass(slots=True)
class HandOver:
    """An image given to an encoder."""

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
        """`event`: the worker's last message about it."""
        self.ended = now
        if isinstance(event, Encoded):
            self.outcome, self.seconds = "encoded", event.seconds
        elif isinstance(event, (Failed, EpddError)):
            self.outcome = "failed" if isinstance(event, Failed) else "lost"
            self.error = event.message[:QUOTED_CHARS_MAX]
        else:
            self.outcome = "cancelled"


@dataclass(slots=True, eq=False)
class EncodingRecord:
    """One encoding of an image, shared by all requests that wait for it."""

    hand_overs: list[HandOver] = field(default_factory=list)
    error: str = ""

    def handed_over(self, worker: str, reason: str, now: float, waited_s: float, predicted_s: float) -> None:
        """The router's decision; `waited_s` since the image was queued."""
        if self.hand_overs and (ended := self.hand_overs[-1].ended) is not None:
            waited_s = now - ended      # a retry: the image did not wait while a worker had it
        self.hand_overs.append(HandOver(worker, reason, now, waited_s, predicted_s))

    def fail(self, error: EpddError) -> None:
        """The image cannot be encoded."""
        self.error = error.message[:QUOTED_CHARS_MAX]


@dataclass(slots=True)
class ImageRecord:
    patches: int
    rows: int                       # image tokens
    source: str = CACHE
    # A request that lost its PD worker may need an encoding twice.
    encodings: list[EncodingRecord] = field(default_factory=list)


@dataclass(slots=True)
class _Placement:
    """One attempt on a PD worker."""

    worker: str
    at: float
    prefilled: float | None = None
    error: str = ""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request; times are of `clock`.

    A completion with several prompts has one record for the HTTP request and one for each prompt.
    """

    id: str
    client_id: str = ""             # the client's x-request-id, if any; need not be unique
    clock: Callable[[], float] = time.monotonic
    arrived: float = field(default_factory=time.monotonic)
    model: str = ""                 # as the request calls it
    outcome: str = "running"        # then completed, rejected, failed or aborted
    status: int = 200               # HTTP status that the client was sent
    code: str = ""                  # of the error
    error: str = ""                 # its message
    answered: bool = False          # the answer is complete, so closing the pipeline is no abort
    prompt_tokens: int = 0
    images: list[ImageRecord] = field(default_factory=list)
    answer_tokens: int = 0          # generated, those of an answer that started again included
    ttft_s: float | None = None
    last_tokens: dict[int, float] = field(default_factory=dict)     # choice -> when its latest tokens came
    finish_reasons: dict[int, str] = field(default_factory=dict)    # by choice
    _began: float | None = None
    _embedded: float | None = None
    _ended: float | None = None
    _placements: list[_Placement] = field(default_factory=list)

    def age(self) -> float:
        """Seconds since arrival."""
        return self.clock() - self.arrived

    def begin(self) -> None:
        """The pipeline has the request."""
        self._began = self.clock()

    def acquired(self, encodings: Sequence[EncodingRecord | None], fresh: Sequence[EncodingRecord]) -> None:
        """Each image has a cache entry.  `encodings`: what each image waits for, None: its embedding is cached;
        `fresh`: those that begin for this request."""
        for index, (image, encoding) in enumerate(zip(self.images, encodings)):
            if encoding is not None:
                repeated = encoding in encodings[:index]
                image.source = REPEATED if repeated else ENCODED if encoding in fresh else JOINED
                image.encodings.append(encoding)

    def embedded(self) -> None:
        """All embeddings are ready."""
        self._embedded = self.clock()

    def placed(self, worker: str) -> None:
        """A PD worker was chosen."""
        self._placements.append(_Placement(worker, self.clock()))

    def prefilled(self) -> None:
        """The PD worker has read the prompt of every choice."""
        self._placements[-1].prefilled = self.clock()

    def lost(self, error: EpddError) -> None:
        """A worker was lost; the request may be retried."""
        if self._placements and not self._placements[-1].error:     # or it was an encoder, in the second attempt
            self._placements[-1].error = error.message[:QUOTED_CHARS_MAX]

    def fail(self, error: EpddError) -> None:
        self.outcome, self.code, self.error = "failed", error.code, error.message[:QUOTED_CHARS_MAX]

    def abort(self) -> None:
        """The client left."""
        self.outcome, self.status = "aborted", _CLIENT_LEFT

    def end(self) -> None:
        """The pipeline's part has ended."""
        self._ended = self.clock()

    def summary(self) -> dict[str, Any]:
        """The request in the list of `epdctl explain`, where every error is "failed": its code says whose fault."""
        return {"id": self.id, "client_id": self.client_id, "age_s": self.age(), "tokens": self.prompt_tokens,
                "outcome": "failed" if self.outcome == "rejected" else self.outcome, "code": self.code,
                "images_count": len(self.images),
                "seconds": self.age() if self._ended is None else self._ended - self.arrived,
                "pd": self._placements[-1].worker if self._placements else None}

    def explain(self) -> dict[str, Any]:
        """All that is known; times ending in `_at_s` are seconds since the request's arrival, None: not (yet)."""
        prefilled = self._placements[-1].prefilled if self._placements else None
        return self.summary() | {
            "error": self.error, "began_at_s": self._since(self._began), "embedded_at_s": self._since(self._embedded),
            "prefilled_at_s": self._since(prefilled), "ended_at_s": self._since(self._ended),
            "images": [{"patches": image.patches, "source": image.source,
                        "error": image.encodings[-1].error if image.encodings else "",
                        "hand_overs": [self._told(each) for each in chain.from_iterable(
                            encoding.hand_overs for encoding in image.encodings)]}
                       for image in self.images],
            "placements": [{"worker": each.worker, "placed_at_s": self._since(each.at), "error": each.error,
                            "prefilled_at_s": self._since(each.prefilled)} for each in self._placements]}

    def _told(self, each: HandOver) -> dict[str, Any]:
        return {"worker": each.worker, "reason": each.reason, "handed_over_at_s": self._since(each.at),
                "waited_s": each.waited_s, "predicted_s": each.predicted_s, "seconds": each.seconds,
                "outcome": each.outcome, "error": each.error, "ended_at_s": self._since(each.ended)}

    def _since(self, at: float | None) -> float | None:
        return None if at is None else at - self.arrived
