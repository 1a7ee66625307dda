"""The prefill-decode role on a GPU: the engine, with a step computed as a GPU wants it.

One copy of numbers to the device begins a step, and waiting for its result, one copy back, ends it: when the next one
is laid out, or a lease let go, nothing of this one is under way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from epdd import wire
from epdd.arena import Mapping
from epdd.errors import WorkerLost
from epdd.worker.gpu import flash
from epdd.worker.gpu.graphs import Graphs
from epdd.worker.gpu.leased import Leased, ask_ahead, splice
from epdd.worker.gpu.transfer import Transfer
from epdd.worker.kernels import cuda, norm
from epdd.worker.language import attention, batch_inputs, kv_cache
from epdd.worker.language.batch_inputs import PromptImage, PromptSequence
from epdd.worker.language.engine import Engine, Logits
from epdd.worker.language.scheduler import HEADROOM_TOKENS, Batch
from epdd.worker.process.loop import Send, failed

log = logging.getLogger(__name__)


class GpuEngine(Engine):
    """The role; `kernels` and `device` are others' in tests."""

    attention = flash.NAME

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping | None, send: Send, headroom: int = HEADROOM_TOKENS,
                 device: cuda.Device | None = None, kernels: dict[str, flash.Kernel] = flash.KERNELS) -> None:
        """Loads the weights and allocates the KV cache.  Raises StartupError."""
        self._gpu = device or cuda.Device(spec.device)
        if spec.gpu_bytes:
            self._gpu.limit(spec.gpu_bytes)
        super().__init__(replace(spec, device=str(self._gpu.torch)), arena, send, headroom)
        self._sizes_max = min(spec.max_sequences, spec.max_batched_tokens)
        self._transfer = Transfer(self._gpu, arena)
        # Kernels of an urgent stream go before those of others in this process: the graphs' and the copies'.
        self._stream = self._gpu.stream(urgent=True)
        _, kv_heads, dim = kv_cache.sizes(self._text.config)
        chosen = flash.choose(self._text.config.num_attention_heads, kv_heads, dim, self.dtype, self._device, kernels)
        self._kernel: flash.Kernel | None = chosen and chosen[1]
        self._graphs: Graphs | None = None
        self._gpu.synchronise()         # the weights and the pool were made on another stream than the steps'
        log.info("%s attention=%s", spec.name, chosen[0] if chosen else "sdpa by sequence")

    @property
    def busy(self) -> bool:
        return super().busy or self._transfer.pinning

    def submit(self, message: wire.ToWorker, raw: bytes) -> None:
        """As of `Engine`, and what the daemon says of arenas."""
        if isinstance(message, wire.CloseArena):
            self._lose(message.arena)
        if not self._transfer.take(message, self._send):
            super().submit(message, raw)

    def step(self) -> None:
        """As of `Engine`; a fault of the device ends the worker.  Raises DeviceError."""
        self._transfer.go_on(self._send)
        with self._gpu.using(self._stream):
            super().step()

    def warm_up(self, progress: Callable[[float], None]) -> wire.Ready:
        """Prefill and decode steps as on CPUs, then decode graphs."""
        ready = super().warm_up(lambda done: progress(done / 2))
        if self._kernel is not None:
            with torch.inference_mode(), self._gpu.using(self._stream):
                self._graphs = Graphs(self._decoded, self._kernel, self._gpu.capture, self._sizes_max,
                                      self.max_model_len, self._device, self._gpu.pinned)
                self._gpu.synchronise()
            log.info("decode graphs for %s sequences", ", ".join(map(str, self._graphs.sizes)) or "no number of")
        progress(1.0)
        return ready

    def _exchange(self, name: str) -> bool:
        log.info("%s norms exchanged=%d", name, norm.fuse(self.model))
        return False

    def _image(self, span: wire.Span, shape: tuple[int, int, int]) -> PromptImage:
        self._transfer.check(span.lease)
        return Leased(span, shape, self._gpu, self._transfer)

    def _run(self, batch: Batch[PromptSequence]) -> Logits:
        layout = self._layout(batch)
        ids, positions = batch_inputs.ids(batch), batch_inputs.positions(batch)
        if self._graphs is not None and self._graphs.fits(len(ids)) and len(ids) == len(layout) \
                and not any(batch_inputs.pieces(batch)):
            return self._read(*self._graphs.run(ids, positions, layout))        # waits for the step
        numbers = self._put(torch.cat((torch.tensor(ids)[None], positions)))
        embeds = self._embed(numbers[0])
        plan = flash.plan(layout, self._kernel, self._put) if self._kernel else attention.plan(layout, self._device)
        hidden = self._hidden(embeds, numbers[1:], plan, **splice(batch, embeds))
        wanted = batch_inputs.wanted(batch)
        ask_ahead(batch, self._scheduler.max_batched_tokens)
        if wanted:
            return self._read(*self._best(hidden[self._put(torch.tensor(wanted))]))
        self._gpu.synchronise(self._stream)
        return Logits(hidden.new_zeros(0, 0), [], [])

    def _decoded(self, ids: torch.Tensor, positions: torch.Tensor,
                 plan: flash.FlashPlan) -> tuple[torch.Tensor, torch.Tensor]:
        return self._best(self._hidden(self._embed(ids), positions, plan))

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the device.  torch keeps pinned memory until the copies from it are done."""
        return self._gpu.pinned(tensor).to(self._device, non_blocking=True)

    def _release(self, request: PromptSequence) -> None:
        """As of `Engine`; a copy that was asked for ahead may still read a lease that is about to be let go."""
        if request.images and not request.prefilled:
            self._gpu.synchronise(self._transfer.stream)
        super()._release(request)

    def _lose(self, arena: int) -> None:
        """End the requests whose images lay in it and are not all read: the daemon places them again."""
        for request in list(self._requests.values()):
            if not request.prefilled and any(isinstance(image, Leased) and image.arena == arena
                                             for image in request.images):
                self._end(request, failed(request.id, WorkerLost(
                    "the encoder whose GPU memory held its images was lost")))
