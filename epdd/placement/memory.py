"""Divides each GPU's memory between its workers: weights, activations, CUDA context, embeddings, KV cache.

The numbers come from the checkpoint, and from the estimates below where only a run could tell.  An encoder measures at
its warm-up what its activations take, and bounds its batches by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from epdd.errors import PlacementError
from epdd.families import ITEMSIZE, ModelInfo
from epdd.hardware.topology import Gpu, Topology
from epdd.placement.text import size_text
from epdd.settings.config import Config
from epdd.wire import WorkerSpec

MIB, GIB = 1 << 20, 1 << 30

# Estimates, not measured on a GPU.
CONTEXT_BYTES = 768 * MIB           # of a process: CUDA's context, kernels, cuBLAS workspaces
READER_BYTES = 512 * MIB            # on an encoder's GPU: the context of a worker of another GPU that reads there
SPARE_SHARE = 0.06                  # of a GPU's memory, kept free: other programs, fragmentation
VISION_BYTES_PER_NUMBER = 64        # peak in a block, for each patch and unit of the vision tower's width
TEXT_BYTES_PER_NUMBER = 96          # likewise for each token of a step and unit of hidden size; the MLP is wider
LOGIT_BYTES = 16                    # for each logit: float32, sorted and masked copies
GRAPH_BYTES = 512 * MIB             # CUDA graphs of decode, of all batch sizes together

POOL_BYTES_MAX = 4 * GIB            # default limit of embeddings on an encoder's GPU (arena.gpu_bytes)
KV_BYTES_MIN = 256 * MIB            # least KV cache that is chosen by itself; with less room the plan is refused


@dataclass(frozen=True)
class GpuMemoryShare:
    """One worker's part of a GPU's memory, in bytes."""

    weights: int = 0
    activations: int = 0
    contexts: int = 0
    embeddings: int = 0
    kv: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.contexts + self.embeddings + self.kv


def divide(specs: Sequence[WorkerSpec], topology: Topology, config: Config,
           family: ModelInfo) -> tuple[list[WorkerSpec], list[str]]:
    """The specs with the sizes of workers on GPUs, and how each GPU's memory is used.

    Raises PlacementError, which lists all sizes, if a GPU has too little memory.
    """
    made, why = {spec.name: spec for spec in specs}, []
    for gpu in topology.gpus:
        here = [spec for spec in specs if spec.device == _device(gpu)]
        if here:
            parts = _parts(gpu, here, specs, topology, config, family)
            for spec in here:
                made[spec.name] = _sized(spec, parts[spec.name], gpu, shared=len(here) > 1)
            why += _told(gpu, parts, family)
    return list(made.values()), why


def _parts(gpu: Gpu, here: Sequence[WorkerSpec], specs: Sequence[WorkerSpec], topology: Topology, config: Config,
           family: ModelInfo) -> dict[str, GpuMemoryShare]:
    parts = {spec.name: _encoder(spec, gpu, specs, topology, config, family) if spec.role == "encoder"
             else _prefill_decode(spec, config, family) for spec in here}
    free = int(gpu.memory_bytes * (1 - SPARE_SHARE)) - sum(part.total for part in parts.values())
    for spec in here:
        if spec.role == "pd" and not parts[spec.name].kv:
            # The KV cache gets the rest: a larger prefix cache is the best use of it.
            parts[spec.name] = replace(parts[spec.name], kv=max(free, KV_BYTES_MIN))
            free -= parts[spec.name].kv
    if free < 0:
        raise PlacementError(f"GPU {gpu.index} has {size_text(gpu.memory_bytes)}, too little by {size_text(-free)} for "
                             + "; ".join(f"{name}: {_listed(part)}" for name, part in parts.items())
                             + "; lower pd.kv_bytes, pd.kv_tokens or arena.gpu_bytes, or take another dtype")
    return parts


def _encoder(spec: WorkerSpec, gpu: Gpu, specs: Sequence[WorkerSpec], topology: Topology, config: Config,
             family: ModelInfo) -> GpuMemoryShare:
    patches = family.rows_max * family.merge ** 2
    readers = [other for other in specs if other.role == "pd" and spec.device in peers(other.device, topology)]
    away = sum(other.device != spec.device for other in readers)
    pool = config.arena.gpu_bytes
    if pool < 0:
        pool = max(min(POOL_BYTES_MAX, gpu.memory_bytes // 32), family.embedding_bytes(family.rows_max, "bfloat16"))
    if len(readers) < sum(other.role == "pd" for other in specs):
        pool = 0        # all PD workers must be able to read there; else embeddings go by host memory
    return GpuMemoryShare(weights=family.parameters[0] * _itemsize(config, family),
                          activations=patches * family.vision_width * VISION_BYTES_PER_NUMBER,
                          contexts=CONTEXT_BYTES + (READER_BYTES * away if pool else 0), embeddings=pool)


def _prefill_decode(spec: WorkerSpec, config: Config, family: ModelInfo) -> GpuMemoryShare:
    itemsize = _itemsize(config, family)
    activations = spec.max_batched_tokens * family.hidden * TEXT_BYTES_PER_NUMBER
    activations += spec.max_sequences * family.vocab * LOGIT_BYTES
    activations += 2 * spec.max_batched_tokens * family.hidden * family.planes * itemsize   # image tokens of two steps
    return GpuMemoryShare(weights=family.parameters[1] * itemsize, activations=activations + GRAPH_BYTES,
                          contexts=CONTEXT_BYTES,
                          kv=spec.kv_tokens * family.kv_numbers * itemsize or config.pd.kv_bytes)


def _sized(spec: WorkerSpec, part: GpuMemoryShare, gpu: Gpu, shared: bool) -> WorkerSpec:
    limit = part.weights + part.activations + part.kv if shared else 0
    return replace(spec, kv_bytes=part.kv, pool_bytes=part.embeddings, gpu_bytes=limit)


def peers(device: str, topology: Topology) -> tuple[str, ...]:
    """GPUs whose memory a worker on `device` can read: its own and its peers by the driver."""
    for gpu in topology.gpus:
        if _device(gpu) == device:
            return device, *(f"cuda:{link.gpu}" for link in gpu.links if link.peer)
    return ()


def _told(gpu: Gpu, parts: dict[str, GpuMemoryShare], family: ModelInfo) -> list[str]:
    rest = gpu.memory_bytes - sum(part.total for part in parts.values())
    unknown = "" if any(family.parameters) else "; the weights' size is not known"
    told = [f"GPU {gpu.index}, {size_text(gpu.memory_bytes)}: " + "; ".join(
        f"{name}: {_listed(part)}" for name, part in parts.items()) + f"; {size_text(rest)} to spare{unknown}"]
    if len(parts) > 1:
        told.append(f"GPU {gpu.index} is shared as asked: kernels of two processes take turns on it, unless NVIDIA's "
                    "MPS runs; then those of prefill and decode go first")
    return told


def _listed(part: GpuMemoryShare) -> str:
    sizes = [(size, "KV cache" if field.name == "kv" else field.name) for field in fields(part)
             if (size := getattr(part, field.name))]
    return ", ".join(f"{name} {size_text(size)}" for size, name in sizes)


def _itemsize(config: Config, family: ModelInfo) -> int:
    """Bytes of a number on a GPU: the choice of `worker/weights/load.py`."""
    if config.model.dtype != "auto":
        return ITEMSIZE[config.model.dtype]
    return 4 if family.stored == "float32" else 2


def _device(gpu: Gpu) -> str:
    return f"cuda:{gpu.index}"
