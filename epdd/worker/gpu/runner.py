"""The model runner of a GPU: a step computed as a GPU wants it.

One copy of numbers to the device begins a step, and waiting for its result, one copy back, ends it: when the next one
is laid out, or a lease is released, nothing of this one is under way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from epdd import wire
from epdd.arena import Mapping
from epdd.worker.gpu import flash
from epdd.worker.gpu.graphs import Graphs
from epdd.worker.gpu.leased import Leased, ask_ahead, splice
from epdd.worker.gpu.transfer import Transfer
from epdd.worker.kernels import cuda, norm
from epdd.worker.language import attention, batch_inputs, kv_cache
from epdd.worker.language.language_model import LanguageModel, output
from epdd.worker.language.model_runner import ModelRunner, PromptSequence, StepOutput
from epdd.worker.language.scheduler import Batch
from epdd.worker.process.loop import Send

log = logging.getLogger(__name__)


class GpuModelRunner(ModelRunner):
    """Tests give other `kernels` and another `device`."""

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping | None, send: Send, device: cuda.Device | None = None,
                 kernels: dict[str, flash.Kernel] = flash.KERNELS) -> None:
        """Loads the weights and allocates the KV cache.  Raises StartupError."""
        self._spec, self._send = spec, send
        self._gpu = device or cuda.Device(spec.device)
        if spec.gpu_bytes:
            self._gpu.limit(spec.gpu_bytes)
        self.language = language = LanguageModel(replace(spec, device=str(self._gpu.torch)), flash.NAME)
        self.info, self.memory, self.ready = language.info, language.pool, language.ready
        log.info("%s norms fused=%d", spec.name, norm.fuse(language.model))
        self._transfer = Transfer(self._gpu, arena)
        # Kernels of an urgent stream go before those of other streams in this process, such as the copies'.
        self._stream = self._gpu.stream(urgent=True)
        config = language.text.config
        _, kv_heads, dim = kv_cache.sizes(config)
        chosen = flash.choose(config.num_attention_heads, kv_heads, dim, language.dtype, language.device, kernels)
        self._kernel: flash.Kernel | None = chosen and chosen[1]
        self.graphs: Graphs | None = None
        self._gpu.synchronise()         # the weights and the pool were made on another stream than the steps'
        log.info("%s attention=%s", spec.name, chosen[0] if chosen else "sdpa by sequence")

    @property
    def busy(self) -> bool:
        """Whether the host's arena is being pinned."""
        return self._transfer.pinning

    def handle(self, message: wire.ToWorker) -> bool:
        """Whether the message was about arenas and is done."""
        return self._transfer.take(message, self._send)

    def prepare(self, request: PromptSequence) -> None:
        """Fill in a new request's input.  Raises BadRequest, WorkerFailed."""
        self.language.prepare(request)
        for span in request.message.spans:
            self._transfer.check(span.lease)
            request.images.append(Leased(span, (self.info.planes, span.rows, self.info.hidden), self._gpu,
                                         self._transfer))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """`with`: one step, and pinning the next portion of the host's arena."""
        self._transfer.go_on(self._send)
        with torch.inference_mode(), self._gpu.using(self._stream):
            yield

    def execute(self, batch: Batch[PromptSequence]) -> StepOutput:
        """Compute a batch, by a graph if each sequence has one row and no image's."""
        language, layout = self.language, self.language.layout(batch)
        ids, positions = batch_inputs.ids(batch), batch_inputs.positions(batch)
        if self.graphs is not None and self.graphs.fits(len(ids)) and len(ids) == len(layout) \
                and not any(batch_inputs.pieces(batch)):
            return output(*self.graphs.run(ids, positions, layout))        # waits for the step
        numbers = self._put(torch.cat((torch.tensor(ids)[None], positions)))
        embeds = language.embed(numbers[0])
        plan = flash.plan(layout, self._kernel, self._put) if self._kernel else attention.plan(layout, language.device)
        hidden = language.hidden(embeds, numbers[1:], plan, **splice(batch, embeds))
        wanted = batch_inputs.wanted(batch)
        ask_ahead(batch, self._spec.max_batched_tokens)
        if wanted:
            return output(*language.best(hidden[self._put(torch.tensor(wanted))]))
        self._gpu.synchronise(self._stream)
        return StepOutput([], [], [])

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the device.  torch keeps pinned memory until the copies from it are done."""
        return self._gpu.pinned(tensor).to(self.language.device, non_blocking=True)

    def fault(self, error: Exception) -> Exception:
        """DeviceError or OutOfMemory if it came from the device."""
        return cuda.fault(error) or error

    def capture(self) -> None:
        """Record decode steps as graphs."""
        if self._kernel is None:
            return
        sizes_max = min(self._spec.max_sequences, self._spec.max_batched_tokens)
        with torch.inference_mode(), self._gpu.using(self._stream):
            self.graphs = Graphs(self._decoded, self._kernel, self._gpu.capture, sizes_max, self.ready.max_model_len,
                                 self.language.device, self._gpu.pinned)
            self._gpu.synchronise()
        log.info("decode graphs for %s sequences", ", ".join(map(str, self.graphs.sizes)) or "no number of")

    def _decoded(self, ids: torch.Tensor, positions: torch.Tensor,
                 plan: flash.FlashPlan) -> tuple[torch.Tensor, torch.Tensor]:
        return self.language.best(self.language.hidden(self.language.embed(ids), positions, plan))
