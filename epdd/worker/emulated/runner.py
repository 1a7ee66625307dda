"""The model runner without a model: it compares leases with what their images' encoder must have written, and
generates a fixed text.  No torch, no numpy."""

from __future__ import annotations

from typing import Any, cast

from epdd import wire
from epdd.arena import Mapping
from epdd.emulated_time import EmulatedModel
from epdd.errors import WorkerFailed
from epdd.worker.emulated import pattern
from epdd.worker.emulated.delay import sized_info
from epdd.worker.language.model_runner import LayerMemory, ModelRunner, PromptSequence, StepOutput
from epdd.worker.language.scheduler import BLOCK_SIZE, Batch


class TextSampler:
    """A `Sampler` without torch: the text, then its end; the text again while the end is ignored or not allowed."""

    plain = complete = False

    def __init__(self, sampling: wire.Sampling, text: tuple[int, ...], stop_ids: frozenset[int],
                 eos_ids: tuple[int, ...]) -> None:
        self._sampling, self._text, self._stop_ids, self._eos_ids = sampling, text, stop_ids, eos_ids
        self._generated = 0

    def choose(self, logits: Any) -> int:
        """The next token, whatever the logits are."""
        early = self._generated < self._sampling.min_tokens
        if self._generated >= len(self._text) and not early and not self._sampling.ignore_eos and self._eos_ids:
            return self._eos_ids[0]
        token = self._text[self._generated % len(self._text)]
        if early and token in self._stop_ids:
            return next((other for other in self._text if other not in self._stop_ids), 0)
        return token

    def logprob(self, logits: Any, token: int) -> wire.TokenLogprob | None:
        """Probability 1, if asked for."""
        if self._sampling.logprobs < 0:
            return None
        return wire.TokenLogprob(0.0, ((token, 0.0),) if self._sampling.logprobs else ())

    def accept(self, token: int) -> None:
        """A token joins the answer."""
        self._generated += 1


class EmulatedModelRunner(ModelRunner):
    """An image's lease is read whole, and compared, in the step whose chunk holds its last row."""

    memory = LayerMemory()

    def __init__(self, spec: wire.WorkerSpec, model: EmulatedModel, text: tuple[int, ...],
                 arena: Mapping | None) -> None:
        self._arena, self._text = arena, text
        self.info = sized_info(spec.model, model)
        capacity = spec.kv_tokens // BLOCK_SIZE * BLOCK_SIZE
        self.ready = wire.Ready(binding=wire.Binding((), (), 1), dtype=model.dtype, kv_tokens=capacity,
                                max_model_len=min(spec.max_model_len, capacity))

    def prepare(self, request: PromptSequence) -> None:
        """Give it the text to generate.  Raises WorkerFailed."""
        if request.message.spans and self._arena is None:
            raise WorkerFailed("there is no arena to read images from")
        request.sampler = cast(Any, TextSampler(request.message.sampling, self._text, request.stop_ids,
                                                self.info.eos_ids))

    def execute(self, batch: Batch[PromptSequence]) -> StepOutput:
        """Read the leases that the batch's rows come from."""
        failed: dict[str, tuple[PromptSequence, Exception]] = {}
        for request, count in batch.chunks:
            try:
                self._read(request, request.computed + count)
            except WorkerFailed as error:
                failed[request.id] = request, error
        wanted = sum(request.pending == count and request.id not in failed for request, count in batch.chunks)
        return StepOutput([cast(Any, None)] * wanted, [0.0] * wanted, [0] * wanted, list(failed.values()))

    def _read(self, request: PromptSequence, end: int) -> None:
        """The leases whose last row is computed now.  Raises WorkerFailed if one holds another image's."""
        if request.prefilled:
            return
        for span in request.message.spans:
            if request.computed < span.end <= end:
                size = self.info.embedding_bytes(span.rows, span.dtype)
                assert self._arena is not None, "checked with the request"
                pattern.check(self._arena.view(wire.Lease(span.lease.offset, size)), span.digest[:wire.CONTENT_LETTERS])
