"""The prefill-decode role: the life of requests.  A step is schedule, execute, postprocess.

The `Scheduler` orders requests, a `ModelRunner` computes, each request's sampler chooses its tokens.  No torch.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable

from epdd import wire
from epdd.errors import BadRequest, ContextLength, ProtocolError, WorkerFailed, WorkerLost
from epdd.families.layers import Positions
from epdd.worker.language.model_runner import ModelRunner, PromptSequence, StepOutput
from epdd.worker.language.prefill_budget import PrefillBudget
from epdd.worker.language.scheduler import HEADROOM_TOKENS, Batch, Scheduler
from epdd.worker.process.loop import Send, failed


class Engine:
    """The role: one step computes a batch of prompt chunks and decode tokens."""

    def __init__(self, spec: wire.WorkerSpec, runner: ModelRunner, send: Send,
                 headroom: int = HEADROOM_TOKENS) -> None:
        self.runner, self._send = runner, send
        self._scheduler: Scheduler[PromptSequence] = Scheduler(
            runner.ready.kv_tokens, spec.max_batched_tokens, spec.max_sequences, headroom, self._begin)
        self._prefill_budget = PrefillBudget(spec.step_s)
        self._requests: dict[str, PromptSequence] = {}
        self._steps = 0
        self.load = (0, 0)      # of the last step: prompt tokens, decoding sequences

    # --- the role

    @property
    def busy(self) -> bool:
        return bool(self._requests) or self.runner.busy

    def heartbeat(self) -> wire.Heartbeat:
        s = self._scheduler
        return wire.Heartbeat(steps=self._steps, running=len(s.running), waiting=len(s.waiting),
                              kv_used=s.capacity - s.free, kv_cached=self.runner.memory.cached, preempted=s.preempted)

    def submit(self, message: wire.ToWorker, raw: bytes) -> None:
        """Queue a request; a bad one is answered by Failed.  Raises ProtocolError on another role's work."""
        if isinstance(message, wire.CloseArena):
            self._lose(message.arena)
        if self.runner.handle(message):
            return
        if not isinstance(message, wire.Generate):
            raise ProtocolError(f"a PD worker cannot do {type(message).__name__}")
        if message.id in self._requests:
            raise ProtocolError(f"request {message.id} is here already")
        try:
            request = self._request(message, raw)
            self.runner.prepare(request)
            self._scheduler.add(request)
        except Exception as error:
            self._send(failed(message.id, error))
            return
        self._requests[message.id] = request

    def cancel(self, work_id: str) -> None:
        """Drop a request, whatever its stage; unknown ids have been answered already."""
        request = self._requests.get(work_id)
        if request:
            self._end(request, wire.Cancelled(work_id))

    def step(self) -> None:
        """Schedule, execute, postprocess.  A fault fails the sequences of its batch only.

        Raises DeviceError, which ends the worker.
        """
        with self.runner.stepping():
            batch = self._scheduler.next_batch(self._prefill_budget.tokens)
            for request in batch.preempted:
                self._release(request)
            counts, began = [count for _, count in batch.chunks], time.monotonic()
            decoding = counts.count(1)
            self.load = sum(counts) - decoding, decoding
            if not counts:
                return
            self._steps += 1
            try:
                self._postprocess(batch, self.runner.execute(batch))
                self._prefill_budget.took(decoding, sum(counts) - decoding, time.monotonic() - began)
            except Exception as error:
                for request, _ in batch.chunks:
                    if request.id in self._requests:
                        self._fail(request, error)

    def warm_up(self, progress: Callable[[float], None]) -> wire.Ready:
        """One full prefill step and a decode step, so that first-use costs are paid before Ready."""
        send, self._send = self._send, lambda message: None
        count = max(1, min(self._scheduler.max_batched_tokens, self.runner.ready.max_model_len - 2))
        warm = wire.Generate("warm-up", (), wire.Sampling(max_tokens=2, temperature=0.0, ignore_eos=True))
        self.submit(warm, bytes(4 * count))
        while self.busy:
            self.step()
        self._send, self._steps = send, 0
        self.runner.memory.forget()
        progress(0.5)
        self.runner.capture()
        progress(1.0)
        return self.runner.ready

    # --- a request's beginning

    def _request(self, message: wire.Generate, raw: bytes) -> PromptSequence:
        sampling, info, limit = message.sampling, self.runner.info, self.runner.ready.max_model_len
        if not raw or len(raw) % 4:
            raise WorkerFailed("a prompt is a positive number of int32 token ids")
        tokens = array("i", raw).tolist()
        if sampling.max_tokens < 1:
            raise BadRequest("max_tokens must be at least 1", param="max_tokens")
        if len(tokens) + sampling.max_tokens > limit:
            raise ContextLength(f"prompt of {len(tokens)} and answer of {sampling.max_tokens} tokens are over "
                                f"the limit of {limit}")
        self._check(message.spans, tokens)
        # If a grammar allows nothing but the end, the answer ends even with ignore_eos.
        eos = info.eos_ids if sampling.grammar or not sampling.ignore_eos else ()
        return PromptSequence(
            id=message.id, message=message, tokens=tokens, prompt=len(tokens), tenant=message.tenant,
            total_max=len(tokens) + sampling.max_tokens, stop_ids=frozenset((*sampling.stop_token_ids, *eos)),
            leases_until=message.spans[-1].end if message.spans else len(tokens))

    def _check(self, spans: tuple[wire.Span, ...], tokens: list[int]) -> None:
        """Raises WorkerFailed where daemon and encoder disagree about the images."""
        info = self.runner.info
        # M-RoPE's positions take neighbouring images for one: a token must lie between them.
        gap = info.positions is Positions.MROPE
        free = -1 if gap else 0         # the first token that may be an image's
        for span in spans:
            if span.start < free + gap or span.end > len(tokens) or span.rows <= 0:
                raise WorkerFailed(f"image rows [{span.start}, +{span.rows}) do not fit the prompt")
            free = span.start
            for start, count in span.places:
                if start < free or count <= 0:
                    raise WorkerFailed(f"image rows [{start}, +{count}) do not fit the prompt")
                free = start + count
                if set(tokens[start:free]) != {info.image_token_id}:
                    raise WorkerFailed(f"image rows [{start}, +{count}) are not all placeholders")
            if sum(count for _, count in span.places) != span.rows:
                raise WorkerFailed(f"runs {span.runs} do not hold {span.rows} rows")
            if info.rows(span.grid) != span.rows:
                raise WorkerFailed(f"grid {span.grid} does not make {span.rows} rows")
            if info.embedding_bytes(span.rows, span.dtype) > span.lease.size:
                raise WorkerFailed(f"a lease of {span.lease.size} bytes is too small for {span.rows} rows")

    def _begin(self, request: PromptSequence) -> int:
        """Place an admitted request; how many of its tokens need no computing.  The last one does: for its logits."""
        found = self.runner.memory.begin(request.id, request.reserved, request.items[:len(request.tokens) - 1])
        request.proven = found
        if not request.prefilled:
            request.cached = found
        return found

    # --- a step

    def _postprocess(self, batch: Batch[PromptSequence], found: StepOutput) -> None:
        """Move every sequence on, and choose a token for those whose last known token was computed."""
        chunks = batch.chunks
        if found.failed:
            for request, problem in found.failed:
                self._fail(request, problem)
            chunks = [(request, count) for request, count in chunks if request.id in self._requests]
        ready: list[PromptSequence] = []
        for request, count in chunks:
            request.computed += count
            if not request.prefilled and request.computed >= request.leases_until:
                self._finish_prefill(request)
            if not request.pending:
                ready.append(request)
        for request, value, best, logits in zip(ready, found.highest, found.best, found.logits):
            try:
                if not math.isfinite(value):
                    raise ArithmeticError("logits are not finite")
                request.proven = request.computed
                if len(request.tokens) == request.prompt:
                    self.runner.memory.share(request.id, request.items[:request.proven])
                token = best if request.sampler.plain else request.sampler.choose(logits)
                if token in request.stop_ids:
                    self._end(request, wire.Done(request.id, "stop", token))
                    continue
                logprob = request.sampler.logprob(logits, token)
                request.sampler.accept(token)
                request.tokens.append(token)
                self._send(wire.Tokens(request.id, (token,), () if logprob is None else (logprob,)))
                if request.sampler.complete:
                    self._end(request, wire.Done(request.id, "stop"))
                elif len(request.tokens) >= request.total_max:
                    self._end(request, wire.Done(request.id, "length"))
            except Exception as error:
                self._fail(request, error)

    def _finish_prefill(self, request: PromptSequence) -> None:
        """Stop reading leases.

        A request whose memory lasts to its end is pinned: it needs its images no more.  Any other may have to
        be computed anew after its leases are gone, so it keeps a copy, a few per cent of its prefill's time.
        """
        request.prefilled = True
        if request.complete and request.images:
            request.pinned, request.images = True, []
        else:
            request.images = [image.kept() for image in request.images]
        self._send(wire.Prefilled(request.id, request.cached))

    # --- a request's end

    def _fail(self, request: PromptSequence, error: Exception) -> None:
        """Raises DeviceError if it is not the request's alone."""
        self._end(request, failed(request.id, self.runner.fault(error)))

    def _lose(self, arena: int) -> None:
        """End the requests whose images lay in it and are not all read: the daemon places them again."""
        for request in list(self._requests.values()):
            if not request.prefilled and any(image.arena == arena for image in request.images):
                self._end(request, failed(request.id, WorkerLost(
                    "the encoder whose GPU memory held its images was lost")))

    def _end(self, request: PromptSequence, last: wire.FromWorker) -> None:
        del self._requests[request.id]
        self._scheduler.remove(request)
        self._release(request)
        self._send(last)

    def _release(self, request: PromptSequence) -> None:
        """Give a request's memory back; what it computed stays known until the memory is needed."""
        if not request.prefilled:
            for image in request.images:    # a copy that was asked for ahead may still read a lease
                image.wait()
        self.runner.memory.share(request.id, request.items[:request.proven])
        self.runner.memory.release(request.id)
