"""Machines and a model family for tests of placement and its display."""

from __future__ import annotations

from collections.abc import Sequence

from epdd.families import ModelInfo
from epdd.hardware.topology import Cpu, Gpu, NumaNode, Topology

GIB = 1 << 30

FAMILY = ModelInfo(
    model_type="qwen3_vl", folder="/models/qwen", image_token_id=1, template_ids=(2, 1, 3), patch=16,
    merge=2, temporal=2, min_pixels=65536, max_pixels=1 << 20, mean=(.5,) * 3, std=(.5,) * 3, hidden=2560, planes=4,
    max_model_len=32768, vocab=1000, eos_ids=(4,))


def machine(cores: Sequence[int], threads: int = 2, gpu_nodes: Sequence[int | None] = (),
            node_memory: int | None = 128 * GIB) -> Topology:
    """One NUMA node and socket for each number of cores; siblings are numbered behind all cores, as on Xeons."""
    total = sum(cores)
    cpus, nodes, first = [], [], 0
    for node, count in enumerate(cores):
        own = []
        for core in range(first, first + count):
            siblings = tuple(core + total * i for i in range(threads))
            own += [Cpu(cpu, core, node, node, siblings) for cpu in siblings]
        nodes.append(NumaNode(node, tuple(sorted(cpu.id for cpu in own)), node_memory))
        cpus += own
        first += count
    gpus = [Gpu(i, "H200", 141 * GIB, f"0000:{i:02x}:00.0", node, ()) for i, node in enumerate(gpu_nodes)]
    memory = None if node_memory is None else node_memory * len(nodes)
    return Topology(tuple(sorted(cpus, key=lambda cpu: cpu.id)), tuple(nodes), tuple(gpus), memory, "Xeon",
                    frozenset({"amx_tile", "amx_bf16"}))
