"""The model runner of CPUs: compiled kernels for few rows, oneDNN's products for many, embeddings read in place."""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager

import msgspec
import torch

from epdd import wire
from epdd.arena import Mapping
from epdd.errors import WorkerFailed
from epdd.worker.kernels import experts, gemm_bf16x3, native, norm, onednn
from epdd.worker.language import attention, batch_inputs, cpu_layer
from epdd.worker.language.batch_inputs import HostRows
from epdd.worker.language.language_model import LanguageModel, output
from epdd.worker.language.model_runner import ModelRunner, PromptSequence, StepOutput
from epdd.worker.language.scheduler import Batch
from epdd.worker.process.loop import Send

log = logging.getLogger(__name__)


class CpuModelRunner(ModelRunner):
    """With the model in this process's memory."""

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping | None, send: Send) -> None:
        """Loads the weights and allocates the KV cache.  Raises StartupError."""
        self._arena = arena
        self.language = LanguageModel(spec, attention.NAME)
        self.info, self.memory = self.language.info, self.language.pool
        self.ready = msgspec.structs.replace(self.language.ready, warning=native.advice())
        self.kernels = self._install_kernels(spec.name)
        self.language.head = self.language.model.get_output_embeddings()

    def _install_kernels(self, name: str) -> bool:
        """Replace parts of the model by faster ones; returns whether compiled kernels are among them."""
        model = self.language.model
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation(experts.NAME)
        kernels = cpu_layer.install(model, self.language.pool)
        if kernels:
            by_amx = self.language.dtype is torch.float32 and not gemm_bf16x3.missing()
            if not (by_amx and onednn.replace_linears(model, gemm_bf16x3.ManyRowsLinear)):
                onednn.replace_linears(model, onednn.UnpackedLinear)
            norm.fuse(model)
        else:
            onednn.pack(model)
        log.info("%s decode kernels=%s", name, native.instructions() if kernels else "none")
        return kernels

    def prepare(self, request: PromptSequence) -> None:
        """Fill in a new request's input.  Raises BadRequest, WorkerFailed."""
        self.language.prepare(request)
        request.images = [self._image(span) for span in request.message.spans]

    def _image(self, span: wire.Span) -> HostRows:
        if self._arena is None:
            raise WorkerFailed("there is no arena to read images from")
        shape = self.info.planes, span.rows, self.info.hidden
        # Invariant: the arena's mapping lives as long as the process, for this tensor does not hold it.
        flat = torch.frombuffer(self._arena.view(span.lease), dtype=getattr(torch, span.dtype), count=math.prod(shape))
        return HostRows(span.places, flat.view(shape))

    def stepping(self) -> AbstractContextManager[object]:
        """`with`: one step."""
        return torch.inference_mode()  # type: ignore[no-any-return]

    def execute(self, batch: Batch[PromptSequence]) -> StepOutput:
        """Compute a batch."""
        layout = self.language.layout(batch)
        # The first sequences decode.  In a step with a long chunk they are computed apart, by the kernels of decode
        # steps: so their logits do not depend on the rest of the batch.  This reads the weights twice.
        first = next((i for i, (_, count) in enumerate(batch.chunks) if count > 1), 0)
        if self.kernels and first and sum(count for _, count in batch.chunks) > native.ROWS_MAX:
            parts = [self._compute(Batch(batch.chunks[part]), layout[part])
                     for part in (slice(first), slice(first, None))]
            return StepOutput([row for part in parts for row in part.logits],
                              [x for part in parts for x in part.highest],
                              [token for part in parts for token in part.best])
        return self._compute(batch, layout)

    def _compute(self, batch: Batch[PromptSequence], layout: list[tuple[int, int, int]]) -> StepOutput:
        language = self.language
        embeds = language.embed(torch.tensor(batch_inputs.ids(batch)))
        hidden = language.hidden(embeds, batch_inputs.positions(batch), attention.plan(layout, language.device),
                                 **batch_inputs.splice(batch, embeds))
        wanted = batch_inputs.wanted(batch)
        if not wanted:
            return StepOutput([], [], [])
        return output(*language.best(hidden[wanted]))
