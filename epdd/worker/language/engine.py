"""The prefill-decode role: schedule, run, postprocess.

Holds only language weights.  transformers' text model runs unchanged on packed batches; memory is
`kv.Pool`, order is `scheduler.Scheduler`, choice is `sampling.Sampler`.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from epdd import families, wire
from epdd.arena import Mapping
from epdd.errors import BadRequest, ContextLength, DeviceError, HardwareError, WorkerFailed
from epdd.families import ModelInfo
from epdd.worker.kernels import cuda, gemm_bf16x3, native, norm, onednn
from epdd.worker.language import attention, batch_inputs, cpu_layer, kv_cache
from epdd.worker.language.batch_inputs import HostRows, PromptImage, PromptSequence
from epdd.worker.language.prefill_budget import PrefillBudget
from epdd.worker.language.request_tracker import RequestTracker
from epdd.worker.language.sampling.sampler import Sampler
from epdd.worker.language.sampling.structured_output import Constraints
from epdd.worker.language.scheduler import HEADROOM_TOKENS, Batch, Scheduler
from epdd.worker.process.loop import Send, failed
from epdd.worker.weights import load

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Logits:
    """What a step found for the rows whose next token is wanted, in batch order."""

    rows: Sequence[torch.Tensor]    # float32 [vocab] each
    highest: list[float]            # of each row: its largest, or NaN where there is one
    best: list[int]                 # the token it belongs to


class Engine(RequestTracker[PromptSequence]):
    """The role: one step computes a batch of prompt chunks and decode tokens."""

    attention = attention.NAME      # what transformers' models call

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping | None, send: Send,
                 headroom: int = HEADROOM_TOKENS) -> None:
        """Loads the weights and allocates the KV cache.  Raises StartupError."""
        self._arena, self._send = arena, send
        loaded = families.load(spec.model)
        self._family: ModelInfo = replace(loaded, eos_ids=spec.eos_ids or loaded.eos_ids)
        self._device = torch.device(spec.device)
        self.model = load.load_language(spec.model, spec.dtype, spec.device, self.attention)
        self._parameters = sum(p.numel() for p in self.model.parameters())
        self.dtype: torch.dtype = self.model.get_output_embeddings().weight.dtype
        self._text, self._head = self.model.get_decoder(), self.model.get_output_embeddings()
        self._embed = self._text.get_input_embeddings()
        named = inspect.signature(self._text.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"   # as of transformers 5.17
        self._constraints = Constraints(spec.model, self._head.out_features, self._family.eos_ids)
        context = min(spec.max_model_len or self._family.max_model_len, self._family.max_model_len)
        kv_dtype = kv_cache.pick_dtype(spec, self.dtype)
        kv_tokens = kv_cache.tokens(spec, self._text.config, kv_dtype, context)
        self.max_model_len = min(context, kv_tokens)
        try:
            self._pool = kv_cache.KVPool(self._text.config, kv_tokens, kv_dtype, self._device)
        except RuntimeError:    # torch has no class of its own for it on CPUs
            raise HardwareError(f"no memory for a KV cache of {kv_tokens} tokens; lower pd.kv_tokens or "
                                "pd.kv_bytes") from None
        self._kernels = self._exchange(spec.name)
        self._head = self.model.get_output_embeddings()
        self._caches = spec.prefix_cache
        self._scheduler: Scheduler[PromptSequence] = Scheduler(kv_tokens, spec.max_batched_tokens, spec.max_sequences,
                                                               headroom, self._begin)
        self._beside = PrefillBudget(spec.step_s)
        self._requests: dict[str, PromptSequence] = {}
        self._steps = 0

    def beat(self) -> wire.Heartbeat:
        s = self._scheduler
        return wire.Heartbeat(steps=self._steps, running=len(s.running), waiting=len(s.waiting),
                              kv_used=s.capacity - s.free, kv_cached=self._pool.cached, preempted=s.preempted)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        """Schedule, run, postprocess.  A fault of the run fails the sequences of its batch only."""
        batch = self._scheduler.next_batch(self._beside.tokens)
        for request in batch.preempted:
            self._release(request)
        if not batch.chunks:
            return
        self._steps += 1
        counts, began = [count for _, count in batch.chunks], time.monotonic()
        try:
            self._postprocess(batch, self._run(batch))
            decoding = counts.count(1)
            self._beside.took(decoding, sum(counts) - decoding, time.monotonic() - began)
        except Exception as error:
            for request, _ in batch.chunks:
                if request.id in self._requests:
                    self._fail(request, error)

    def warm_up(self, progress: Callable[[float], None]) -> wire.Ready:
        """One full prefill step and a decode step, so that first-use costs are paid before Ready."""
        send, self._send = self._send, lambda message: None
        count = max(1, min(self._scheduler.max_batched_tokens, self.max_model_len - 2))
        warm = wire.Generate("warm-up", (), wire.Sampling(max_tokens=2, temperature=0.0, ignore_eos=True))
        self.submit(warm, np.zeros(count, np.int32).tobytes())
        while self.busy:
            self.step()
        self._send, self._steps = send, 0
        self._pool.forget()
        progress(1.0)
        return wire.Ready(binding=wire.Binding((), (), torch.get_num_threads()), dtype=load.dtype_name(self.dtype),
                          kv_tokens=self._scheduler.capacity, max_model_len=self.max_model_len,
                          parameters=self._parameters,
                          warning=native.advice() if self._device.type == "cpu" else "")

    def _exchange(self, name: str) -> bool:
        """Put this device's faster parts in the place of the model's own; whether compiled kernels are among them."""
        kernels = cpu_layer.install(self.model, self._pool)
        if kernels:
            by_amx = self.dtype is torch.float32 and not gemm_bf16x3.missing()
            if not (by_amx and onednn.exchange(self.model, gemm_bf16x3.ManyRowsLinear)):
                onednn.exchange(self.model, onednn.UnpackedLinear)
            norm.fuse(self.model)
        else:
            onednn.pack(self.model)
        log.info("%s decode kernels=%s", name, native.instructions() if kernels else "none")
        return kernels

    # --- a request's beginning

    def _request(self, message: wire.Generate, raw: bytes) -> PromptSequence:
        s = message.sampling
        if not raw or len(raw) % 4:
            raise WorkerFailed("a prompt is a positive number of int32 token ids")
        tokens: list[int] = np.frombuffer(raw, np.int32).tolist()
        vocab = self._embed.num_embeddings
        if min(tokens) < 0 or max(tokens) >= vocab:
            raise BadRequest(f"token ids must lie in 0..{vocab - 1}")
        if s.max_tokens < 1:
            raise BadRequest("max_tokens must be at least 1", param="max_tokens")
        if len(tokens) + s.max_tokens > self.max_model_len:
            raise ContextLength(f"prompt of {len(tokens)} and answer of {s.max_tokens} tokens are over "
                                f"the limit of {self.max_model_len}")
        images = self._images(message.spans, tokens)
        positions, delta = self._positions(tokens, message.spans)
        content = batch_inputs.content(tokens, message.spans, message.salt) if self._caches else ()
        constraint = self._constraints.make(s) if s.grammar else None
        # A grammar may leave nothing but the end, which then ends the answer whatever ignore_eos says.
        eos = frozenset(self._family.eos_ids) if constraint or not s.ignore_eos else frozenset()
        stop = frozenset(s.stop_token_ids) | eos
        return PromptSequence(
            id=message.id, tokens=tokens, prompt=len(tokens), total_max=len(tokens) + s.max_tokens,
            sampler=Sampler(s, tokens, stop, self._head.out_features, self._device, constraint), stop_ids=stop,
            max_tokens=s.max_tokens, positions=positions, delta=delta, images=images,
            leases_until=images[-1].end if images else len(tokens), content=content,
            twins=hash(content) if content else None, tenant=message.tenant)

    def _images(self, spans: tuple[wire.Span, ...], tokens: list[int]) -> list[PromptImage]:
        """The spans' embeddings, read in place.  Raises WorkerFailed where daemon and encoder disagree."""
        images: list[PromptImage] = []
        end = -1
        for span in spans:
            # get_rope_index takes neighbouring images for one: a token must lie between them.
            if not (end < span.start and span.start + span.rows <= len(tokens) and span.rows > 0):
                raise WorkerFailed(f"image rows [{span.start}, +{span.rows}) do not fit the prompt")
            end = span.start + span.rows
            if set(tokens[span.start:end]) != {self._family.image_token_id}:
                raise WorkerFailed(f"image rows [{span.start}, +{span.rows}) are not all placeholders")
            if self._family.rows(span.grid) != span.rows:
                raise WorkerFailed(f"grid {span.grid} does not make {span.rows} rows")
            if self._family.embedding_bytes(span.rows, span.dtype) > span.lease.size:
                raise WorkerFailed(f"a lease of {span.lease.size} bytes is too small for {span.rows} rows")
            images.append(self._image(span, (self._family.planes, span.rows, self._family.hidden)))
        return images

    def _image(self, span: wire.Span, shape: tuple[int, int, int]) -> PromptImage:
        if self._arena is None:
            raise WorkerFailed("there is no arena to read images from")
        # Invariant: the arena's mapping lives as long as the process, for this tensor does not hold it.
        flat = torch.frombuffer(self._arena.view(span.lease), dtype=getattr(torch, span.dtype), count=math.prod(shape))
        return HostRows(span.start, flat.view(shape))

    def _positions(self, tokens: list[int], spans: tuple[wire.Span, ...]) -> tuple[torch.Tensor | None, int]:
        if not spans:
            return None, 0
        ids = torch.tensor([tokens])
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        for span in spans:
            kinds[0, span.start:span.start + span.rows] = 1
        positions, delta = self.model.base_model.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=torch.tensor([span.grid for span in spans]))
        return positions[:, 0], int(delta)

    def _begin(self, request: PromptSequence) -> int:
        """Place an admitted request; how many of its tokens need no computing.  The last one does: for its logits."""
        found = self._pool.begin(request.id, request.reserved, request.items[:len(request.tokens) - 1])
        request.proven = found
        if not request.prefilled:
            request.cached = found
        return found

    # --- a step

    def _run(self, batch: Batch[PromptSequence]) -> Logits:
        layout = self._layout(batch)
        # The first sequences decode.  Beside a long chunk they are computed apart, by the same kernels as ever: so
        # their values do not depend on their company, for the price of reading the weights once more.
        first = next((i for i, (_, count) in enumerate(batch.chunks) if count > 1), 0)
        if self._kernels and first and sum(count for _, count in batch.chunks) > native.ROWS_MAX:
            parts = [self._compute(Batch(batch.chunks[part]), layout[part])
                     for part in (slice(first), slice(first, None))]
            return Logits([row for part in parts for row in part.rows], [x for part in parts for x in part.highest],
                          [token for part in parts for token in part.best])
        return self._compute(batch, layout)

    def _compute(self, batch: Batch[PromptSequence], layout: list[tuple[int, int, int]]) -> Logits:
        ids = torch.tensor(batch_inputs.ids(batch), device=self._device)
        embeds = self._embed(ids)
        plan = attention.plan(layout, self._device)
        hidden = self._hidden(embeds, batch_inputs.positions(batch).to(self._device), plan,
                              **batch_inputs.splice(batch, embeds))
        wanted = batch_inputs.wanted(batch)
        if not wanted:
            return Logits(hidden.new_zeros(0, 0), [], [])
        return self._read(*self._best(hidden[wanted]))

    def _layout(self, batch: Batch[PromptSequence]) -> list[tuple[int, int, int]]:
        """(count, extent offset, tokens computed before) of each sequence; offsets stay for this step."""
        for request, _ in batch.chunks:
            self._pool.hold(request.id, request.reserved)
        return [(count, self._pool.offset(request.id), request.computed) for request, count in batch.chunks]

    def _hidden(self, embeds: torch.Tensor, positions: torch.Tensor, plan: Any, **visual: Any) -> torch.Tensor:
        """Hidden states [T, hidden] of rows with these embeddings [T, hidden] and positions [3, T]."""
        out = self._text(inputs_embeds=embeds[None], position_ids=positions[:, None], use_cache=False, plan=plan,
                         **{self._cache_name: self._pool.at(plan.slots)}, **visual)
        return out.last_hidden_state[0]

    def _best(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit and its token, float32 [2, n], and all logits, float32 [n, vocab]."""
        logits = self._head(hidden).float()
        values, ids = logits.max(-1)    # a NaN anywhere in a row comes out as its maximum
        return torch.stack((values, ids.float())), logits       # float32 holds integers up to 16 million

    @staticmethod
    def _read(best: torch.Tensor, logits: torch.Tensor) -> Logits:
        values, ids = best.tolist()
        return Logits(logits, values, [int(token) for token in ids])

    def _postprocess(self, batch: Batch[PromptSequence], found: Logits) -> None:
        """Move every sequence on, and choose a token for those whose last known token was computed."""
        ready: list[PromptSequence] = []
        for request, count in batch.chunks:
            request.computed += count
            if not request.prefilled and request.computed >= request.leases_until:
                self._let_go(request)
            if not request.pending:
                ready.append(request)
        for request, value, best, logits in zip(ready, found.highest, found.best, found.rows):
            try:
                if not math.isfinite(value):
                    raise ArithmeticError("logits are not finite")
                request.proven = request.computed
                if len(request.tokens) == request.prompt:
                    self._pool.share(request.id, request.items[:request.proven])
                self._advance(request, best if request.sampler.plain else request.sampler.choose(logits), logits)
            except Exception as error:
                self._fail(request, error)

    def _let_go(self, request: PromptSequence) -> None:
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

    def _advance(self, request: PromptSequence, token: int, logits: torch.Tensor) -> None:
        if token in request.stop_ids:
            self._end(request, wire.Done(request.id, "stop", token))
            return
        logprob = request.sampler.logprob(logits, token)
        request.sampler.accept(token)
        request.tokens.append(token)
        self._send(wire.Tokens(request.id, (token,), () if logprob is None else (logprob,)))
        if request.sampler.complete:
            self._end(request, wire.Done(request.id, "stop"))
        elif len(request.tokens) - request.prompt >= request.max_tokens:
            self._end(request, wire.Done(request.id, "length"))

    def _fail(self, request: PromptSequence, error: Exception) -> None:
        """Raises DeviceError where it is not the request's alone."""
        problem = cuda.fault(error)
        if isinstance(problem, DeviceError):
            raise problem
        self._end(request, failed(request.id, problem or error))

    def _release(self, request: PromptSequence) -> None:
        """Give a request's memory back; what it computed stays known until the memory is needed."""
        self._pool.share(request.id, request.items[:request.proven])
        self._pool.release(request.id)
