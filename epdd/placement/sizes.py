"""Makes worker specs of placements: arena slices, KV cache sizes, and what all workers share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from epdd import arena
from epdd.errors import PlacementError
from epdd.families import ModelInfo
from epdd.hardware.topology import HugePages, Topology
from epdd.placement import memory
from epdd.placement.assignment import Placement
from epdd.placement.text import size_text
from epdd.settings.config import Config
from epdd.wire import WorkerSpec

ARENA_BYTES_MIN = 64 << 20
ARENA_BYTES_MAX = 4 << 30           # default limit (arena.bytes)
KV_BYTES_MAX = 8 << 30              # default limit (pd.kv_bytes)
IMAGES_IN_ARENA = 1024              # images of the largest size in a default arena


def arena_bytes(config: Config, topology: Topology, family: ModelInfo) -> int:
    """Size of the arena in bytes: whole huge pages, or whole small ones if it is smaller than a huge page.

    Raises PlacementError if memory cannot hold it.
    """
    image = family.embedding_bytes(family.rows_max)
    size = config.arena.bytes
    if not size:
        size = min(ARENA_BYTES_MAX, IMAGES_IN_ARENA * image, (topology.memory_bytes or ARENA_BYTES_MAX * 4) // 4)
        size = max(size, ARENA_BYTES_MIN, image)
    if topology.memory_bytes and size > topology.memory_bytes:
        reason = "arena.bytes" if config.arena.bytes else "the largest image's embedding"
        raise PlacementError(f"{reason} is {size_text(size)}; "
                             f"the machine has {size_text(topology.memory_bytes)} of memory")
    page = arena.HUGE if size >= arena.HUGE else arena.PAGE
    return -(-size // page) * page


def specs(workers: Sequence[Placement], topology: Topology, config: Config, family: ModelInfo,
          arena_bytes: int) -> list[WorkerSpec]:
    """One spec for each worker, encoders first; `memory.py` adds the sizes in GPU memory.

    Raises PlacementError if memory cannot hold what is asked for.
    """
    encoders = [worker for worker in workers if worker.role == "encoder"]
    pds = [worker for worker in workers if worker.role == "pd"]
    common = WorkerSpec(
        name="", role="", device="cpu", cpus=(), numa_node=None, threads=0, model=family.folder,
        weights=family.weights, eos_ids=family.eos_ids, dtype=config.model.dtype, arena_bytes=arena_bytes,
        huge_pages=config.arena.huge_pages, max_batched_tokens=config.pd.max_batched_tokens,
        max_sequences=config.pd.max_sequences, max_model_len=config.model.max_model_len, log_level=config.log.level)
    slices = arena.slices(arena_bytes, len(encoders))
    made = []
    for i, worker in enumerate(encoders):
        made.append(replace(_spec(common, worker, i), arena_slice=slices[i], quantize=config.encoder.quantize))
    for i, worker in enumerate(pds):
        spec = _spec(common, worker, i)
        made.append(replace(spec, kv_tokens=config.pd.kv_tokens, kv_bytes=_kv_bytes(config, worker, topology, pds),
                            kv_dtype=config.pd.kv_dtype, prefix_cache=config.pd.prefix_cache, step_s=config.pd.step_s,
                            peers=memory.peers(spec.device, topology)))
    return made


def _spec(common: WorkerSpec, worker: Placement, i: int) -> WorkerSpec:
    return replace(common, name=f"{worker.role}/{i}", role=worker.role, cpus=worker.cpus, threads=worker.threads,
                   device="cpu" if worker.gpu is None else f"cuda:{worker.gpu.index}", numa_node=worker.node)


def _kv_bytes(config: Config, worker: Placement, topology: Topology, pds: Sequence[Placement]) -> int:
    """KV cache bytes of one PD worker on CPUs, its share of the machine's memory; 0 on a GPU (`memory.py` decides)."""
    if worker.gpu is not None:
        return 0
    memory = topology.memory_bytes
    if config.pd.kv_bytes:
        if memory and config.pd.kv_bytes > memory:
            raise PlacementError(f"pd.kv_bytes is {size_text(config.pd.kv_bytes)}; "
                                 f"the machine has {size_text(memory)} of memory")
        return config.pd.kv_bytes
    share = (memory or KV_BYTES_MAX * 8) // 8
    on_cpus = [other.node for other in pds if other.gpu is None]
    # The cache is bound to one NUMA node, which must also hold the weights and an encoder.
    own = [node.memory_bytes for node in topology.nodes if node.id == worker.node and node.memory_bytes]
    return min(KV_BYTES_MAX, share // len(on_cpus), *(memory // 2 // on_cpus.count(worker.node) for memory in own))


def fits_reserved_pages(specs: Sequence[WorkerSpec], topology: Topology) -> bool:
    """Whether the reserved huge pages hold the whole arena, and those of each NUMA node the slices bound there."""
    needs: Counter[int | None] = Counter()
    for spec in specs:
        needs[spec.numa_node] += spec.arena_slice[1]
    free = {node.id: _free_huge(node.huge_pages) for node in topology.nodes}
    return (any(spec.huge_pages for spec in specs) and needs.total() <= _free_huge(topology.huge_pages)
            and all(need <= free.get(node, 0) for node, need in needs.items() if node is not None))


def _free_huge(pages: Sequence[HugePages]) -> int:
    return sum(size.free * size.page_bytes for size in pages if size.page_bytes == arena.HUGE)


def dtype_reason(topology: Topology, config: Config) -> str:
    """Which dtype workers on CPUs compute in, and why; each worker also asks torch."""
    if config.model.dtype != "auto":
        return f"model.dtype is {config.model.dtype}, as asked"
    if topology.bf16:
        return f"CPUs can compute in bfloat16: they have {'AMX' if topology.amx else 'AVX512-BF16'}"
    amx = "the kernel does not allow AMX" if "amx_bf16" in topology.flags else "they have neither AMX nor AVX512-BF16"
    return f"CPUs compute in float32: {amx}"
