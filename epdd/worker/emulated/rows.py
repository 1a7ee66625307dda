"""Both roles without a model: rows of true size in the leases, and a fixed text.  No torch, no numpy.

Images are not decoded, so a file that is damaged behind its header is encoded like any other.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from epdd import families, wire
from epdd.arena import Mapping
from epdd.emulated_time import EmulatedModel
from epdd.errors import BadRequest, ContextLength, WorkerFailed
from epdd.families import ModelInfo
from epdd.worker.emulated import pattern
from epdd.worker.emulated.paced import encoder_pace, pd_pace
from epdd.worker.language.request_tracker import RequestTracker
from epdd.worker.language.scheduler import Batch, Scheduler, Sequence
from epdd.worker.process.loop import Send, failed

Load = tuple[int, int]              # of a step: prompt tokens, decoding sequences
NOTHING: Load = (0, 0)


def load_of(batch: Batch[Any]) -> Load:
    """Before the step's tokens are counted as computed."""
    return (sum(count for sequence, count in batch.chunks if sequence.pending > 1),
            sum(sequence.pending == 1 for sequence, _ in batch.chunks))


def _family(folder: str, model: EmulatedModel | None) -> tuple[ModelInfo, str]:
    """The checkpoint's placeholders with the profile's sizes, and the dtype."""
    assert model is not None
    return replace(families.load(folder), patch=model.patch, merge=model.merge, hidden=model.hidden,
                   planes=model.planes), model.dtype


class RowsEncoder:
    """Answers in `submit`: writing a pattern is all there is to do."""

    busy = False

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping | None, send: Send) -> None:
        if arena is None:
            raise WorkerFailed("an encoder needs the arena")
        self._arena, self._send = arena, send
        self._family, self._dtype = _family(spec.model, encoder_pace(spec)[0].model)

    def submit(self, message: wire.Encode, raw: bytes) -> None:
        """Write the rows and answer Encoded, or Failed where they do not fit."""
        try:
            size = self._size(message)
        except WorkerFailed as error:
            self._send(failed(message.id, error))
            return
        pattern.write(self._arena.view(wire.Lease(message.lease.offset, size)), wire.content_hash(raw))
        self._send(wire.Encoded(message.id, rows=message.rows, bytes=size, dtype=self._dtype, seconds=0.0))

    def step(self) -> None:
        """Nothing is left to do."""

    def warm_up(self, progress: Callable[[float], None]) -> wire.Ready:
        progress(1.0)
        return wire.Ready(binding=wire.Binding((), (), 1), dtype=self._dtype)

    def _size(self, message: wire.Encode) -> int:
        rows = self._family.rows(message.grid)
        if rows != message.rows:
            raise WorkerFailed(f"grid {message.grid} makes {rows} rows, not {message.rows}")
        self._arena.view(message.lease)     # raises where the lease lies outside
        size = self._family.embedding_bytes(rows, self._dtype)
        if size > message.lease.size:
            raise WorkerFailed(f"a lease of {message.lease.size} bytes does not hold {size}")
        return size


@dataclass(eq=False, kw_only=True)
class RowsRequest(Sequence):
    """A sequence with the leases it reads and what it says."""

    sampling: wire.Sampling
    stop_ids: frozenset[int]
    spans: list[wire.Span]          # not read yet
    leases_until: int               # tokens to compute before no lease is read any more
    prefilled: bool = False


class RowsEngine(RequestTracker[RowsRequest]):
    """One step advances a batch of prompt chunks and decode tokens, with the real scheduler.

    An image's lease is read whole, and compared, in the step whose chunk holds its last row.
    """

    # Anything else is a fault of the emulation itself, and ends the worker.
    answered = (BadRequest, ContextLength, WorkerFailed)

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping | None, send: Send) -> None:
        self._arena, self._send = arena, send
        pace, _ = pd_pace(spec)
        self._family, self._dtype = _family(spec.model, pace.model)
        self._text = pace.text
        self._scheduler: Scheduler[RowsRequest] = Scheduler(spec.kv_tokens, spec.max_batched_tokens, spec.max_sequences)
        self._max_model_len = min(spec.max_model_len, self._scheduler.capacity)
        self._requests: dict[str, RowsRequest] = {}
        self._steps = 0
        self.load = NOTHING

    def beat(self) -> wire.Heartbeat:
        s = self._scheduler
        return wire.Heartbeat(steps=self._steps, running=len(s.running), waiting=len(s.waiting),
                              kv_used=s.capacity - s.free, preempted=s.preempted)

    def step(self) -> None:
        """Schedule, read leases, say tokens; `load` is what the step was of."""
        batch = self._scheduler.next_batch()
        self.load = load_of(batch)
        self._steps += bool(batch.chunks)
        for request, count in batch.chunks:
            request.computed += count
            try:
                self._read(request)
            except WorkerFailed as error:
                self._end(request, failed(request.id, error))
                continue
            if not request.pending:
                self._advance(request)

    def warm_up(self, progress: Callable[[float], None]) -> wire.Ready:
        progress(1.0)
        return wire.Ready(binding=wire.Binding((), (), 1), dtype=self._dtype, kv_tokens=self._scheduler.capacity,
                          max_model_len=self._max_model_len)

    def _request(self, message: wire.Generate, raw: bytes) -> RowsRequest:
        sampling, tokens = message.sampling, array("i", raw).tolist()
        if not tokens or sampling.max_tokens < 1:
            raise BadRequest("a prompt and max_tokens must be at least 1 token")
        total = len(tokens) + sampling.max_tokens
        if total > self._max_model_len:
            raise ContextLength(f"prompt and answer of {total} tokens are over the limit of {self._max_model_len}")
        for span in message.spans:
            if set(tokens[span.start:span.start + span.rows]) != {self._family.image_token_id}:
                raise WorkerFailed(f"image rows [{span.start}, +{span.rows}) are not all placeholders")
            if self._arena is None or self._family.embedding_bytes(span.rows, span.dtype) > span.lease.size:
                raise WorkerFailed(f"a lease of {span.lease.size} bytes is too small for {span.rows} rows")
        stop = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(self._family.eos_ids))
        spans = sorted(message.spans, key=lambda span: span.start)
        return RowsRequest(id=message.id, tokens=tokens, prompt=len(tokens), total_max=total, sampling=sampling,
                           stop_ids=stop, spans=spans, tenant=message.tenant,
                           leases_until=spans[-1].start + spans[-1].rows if spans else len(tokens))

    def _read(self, request: RowsRequest) -> None:
        """The leases whose rows are computed by now.  Raises WorkerFailed where one holds another image's."""
        while request.spans and request.spans[0].start + request.spans[0].rows <= request.computed:
            span = request.spans.pop(0)
            size = self._family.embedding_bytes(span.rows, span.dtype)
            assert self._arena is not None, "checked with the request"
            pattern.check(self._arena.view(wire.Lease(span.lease.offset, size)), span.digest[:wire.CONTENT_LETTERS])
        if not request.prefilled and request.computed >= request.leases_until:
            request.prefilled = True
            self._send(wire.Prefilled(request.id))

    def _advance(self, request: RowsRequest) -> None:
        sampling, said = request.sampling, len(request.tokens) - request.prompt
        token = self._next(request, said)
        if token in request.stop_ids:
            self._end(request, wire.Done(request.id, "stop", token))
            return
        request.tokens.append(token)
        logprobs: tuple[wire.TokenLogprob, ...] = ()
        if sampling.logprobs >= 0:
            logprobs = (wire.TokenLogprob(0.0, ((token, 0.0),) if sampling.logprobs else ()),)
        self._send(wire.Tokens(request.id, (token,), logprobs))
        if said + 1 >= sampling.max_tokens:
            self._end(request, wire.Done(request.id, "length"))

    def _next(self, request: RowsRequest, said: int) -> int:
        """The text, then its end; over and over where that end is not heeded, or not yet."""
        early = said < request.sampling.min_tokens
        if said >= len(self._text) and not early and not request.sampling.ignore_eos and self._family.eos_ids:
            return self._family.eos_ids[0]
        token = self._text[said % len(self._text)]
        if early and token in request.stop_ids:
            return next((other for other in self._text if other not in request.stop_ids), 0)
        return token
