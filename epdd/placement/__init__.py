"""Which worker runs where: topology and settings in, worker specs out.  Pure; nothing is started or bound.

Five steps, each with its reasons, which `explain.py` prints:
`domains.py` lists the NUMA nodes that have CPUs and memory, with their free physical cores;
`counts.py` decides how many workers of each role there are, on GPUs and on CPUs;
`assignment.py` gives each worker a domain and whole cores of it, so that its memory is local;
`sizes.py` sets arena slices and KV cache sizes; `memory.py` divides each GPU's memory.

A core with hyperthreads counts once: a second thread would slow the first.  The daemon may use the siblings.
"""

from __future__ import annotations

from dataclasses import dataclass

from epdd.emulation import Emulation
from epdd.families import ModelInfo
from epdd.hardware.topology import Topology
from epdd.placement import assignment, counts, domains, emulated, memory, sizes
from epdd.placement.explain import explain
from epdd.placement.sizes import arena_bytes, fits_reserved_pages
from epdd.settings.config import Config
from epdd.wire import WorkerSpec

__all__ = ["Plan", "arena_bytes", "decide", "explain", "fits_reserved_pages", "plan"]


@dataclass(frozen=True)
class Plan:
    specs: list[WorkerSpec]
    why: list[str]              # one line for each decision


def plan(topology: Topology, config: Config, family: ModelInfo, arena_bytes: int,
         emulation: Emulation | None = None) -> list[WorkerSpec]:
    """The workers: encoders on GPUs, encoders on CPUs, then prefill-decode.  Raises PlacementError."""
    return decide(topology, config, family, arena_bytes, emulation).specs


def decide(topology: Topology, config: Config, family: ModelInfo, arena_bytes: int,
           emulation: Emulation | None = None) -> Plan:
    """The workers and the reasons; with an emulation those of its profile.  Raises PlacementError."""
    if emulation is not None:
        return Plan(*emulated.decide(emulation, config, family, arena_bytes))
    asked = assignment.asked(topology, config.worker)
    parts, why = domains.read(topology, {cpu for worker in asked for cpu in worker.cpus})
    decided, more = counts.decide(topology, config, len(parts), asked)
    made = assignment.fill(topology, [*asked, *decided], parts)
    specs = sizes.specs(made, topology, config, family, arena_bytes)
    specs, gpus = memory.divide(specs, topology, config, family)
    why += [*more, sizes.dtype_reason(topology, config), *domains.kept(parts), *gpus]
    why += domains.unused(topology, {spec.numa_node for spec in specs})
    return Plan(specs, why + [f"{spec.name} ({spec.device}): {worker.why}" for spec, worker in zip(specs, made)])
