"""A plan as text for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from epdd.hardware.topology import Topology, plural, ranges
from epdd.placement.text import size_text
from epdd.wire import WorkerSpec

COLUMNS = 100


def explain(specs: Sequence[WorkerSpec], topology: Topology, why: Sequence[str] = ()) -> str:
    """The plan as a table, then its reasons, wrapped at COLUMNS; a long list of CPUs makes the table wider."""
    header = ("WORKER", "DEVICE", "NUMA", "CPUS", "THREADS", "MEMORY")
    rows = [header]
    for spec in specs:
        kv = size_text(spec.kv_bytes) if spec.kv_bytes else f"{spec.kv_tokens} tokens"
        memory = f"KV {kv}" if spec.role == "pd" else f"arena {size_text(spec.arena_slice[1])}"
        if spec.pool_bytes:
            memory += f", {size_text(spec.pool_bytes)} on its GPU"
        node = "-" if spec.numa_node is None else str(spec.numa_node)
        rows.append((spec.name, spec.device, node, ranges(spec.cpus) or "-", str(spec.threads), memory))
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    left = {cpu.id for cpu in topology.cpus}.difference(*(spec.cpus for spec in specs))
    return "\n".join([machine(topology), "", *table, "",
                      *reasons(why), *[""] * bool(why),
                      f"left to the daemon and the system: CPUs {ranges(left) or 'none of their own'}",
                      *(f"warning: {warning}" for warning in topology.warnings)])


def reasons(why: Sequence[str]) -> list[str]:
    return [line for reason in why
            for line in textwrap.wrap(reason, COLUMNS, initial_indent="- ", subsequent_indent="  ")]


def machine(topology: Topology) -> str:
    """The machine in one line."""
    kinds: dict[str, int] = {}
    for gpu in topology.gpus:
        kinds[gpu.name] = kinds.get(gpu.name, 0) + 1
    parts = [plural(topology.sockets, "socket"), plural(len(topology.nodes), "NUMA node"),
             f"{plural(topology.cores, 'core')} ({plural(len(topology.cpus), 'CPU')})",
             f"{size_text(topology.memory_bytes)} memory" if topology.memory_bytes else "memory unknown",
             ", ".join(f"{number} x {name}" for name, number in kinds.items()) or "no GPU",
             "AMX" if topology.amx else "AVX512-BF16" if topology.bf16 else "no bfloat16 on CPUs"]
    return f"{topology.model or 'unknown CPU'}: {', '.join(parts)}"
