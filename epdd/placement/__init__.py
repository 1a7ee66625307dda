"""Which worker runs where: topology and settings in, worker specs out.  Pure; nothing is started or bound.

The machine is seen as domains: NUMA nodes that have CPUs and memory, each with its free physical cores
(`domains.py`).  The roles and counts become seats (`counts.py`), each seat gets a domain and whole cores of it, so
that its memory is local (`assignment.py`), and the sizes that all share are filled in (`sizes.py`), then what each
takes of its GPU's memory (`memory.py`).  Of a core with hyperthreads only one logical CPU is used: a second thread on
it would slow the first, and the siblings are left to the daemon.  Every step says why; `explain.py` makes text of it.
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
    parts, why = domains.read(topology, {cpu for seat in asked for cpu in seat.cpus})
    decided, more = counts.decide(topology, config, len(parts), asked)
    made = assignment.fill(topology, [*asked, *decided], parts)
    specs = sizes.specs(made, topology, config, family, arena_bytes)
    specs, gpus = memory.divide(specs, topology, config, family)
    why += [*more, sizes.dtype_reason(topology, config), *domains.kept(parts), *gpus]
    why += domains.unused(topology, {spec.numa_node for spec in specs})
    return Plan(specs, why + [f"{spec.name} ({spec.device}): {seat.why}" for spec, seat in zip(specs, made)])
