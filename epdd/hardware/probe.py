"""Reads the machine into a Topology.  Missing or odd files give a poorer answer, never an exception."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from epdd.hardware import cpu, gpus, nodes
from epdd.hardware.topology import Gpu, Topology, ranges


def probe(sysroot: str | Path = "/", affinity: Collection[int] | None = None,
          gpus_known: tuple[Gpu, ...] | None = None) -> Topology:
    """What is below `sysroot`, reduced to what this process may use.

    `affinity` is the set of CPUs to stay within (None: this process's own on the live system, all on a saved
    one); `gpus_known` stands in for asking NVML, which only the live system can be.
    """
    root = Path(sysroot)
    live = root.resolve() == Path("/")
    if affinity is None and live:
        affinity = os.sched_getaffinity(0)
    warnings: list[str] = []
    usable = _usable(root, affinity, warnings)
    numa = nodes.read(root, usable)
    node_of, claimed_twice = nodes.node_of_cpus(numa)
    if claimed_twice:
        warnings.append(f"CPUs {ranges(claimed_twice)} are listed by several NUMA nodes: taken as in none")
    found: tuple[Gpu, ...] = gpus_known or ()
    if gpus_known is None and live:
        found, more = gpus.read(root, usable, numa)
        warnings += more
    model, flags = cpu.model_and_flags(root)
    return Topology(cpus=cpu.read(root, usable, node_of), nodes=numa, gpus=found,
                    memory_bytes=nodes.memory(root), model=model, flags=flags,
                    amx_allowed=not live or "amx_tile" not in flags or cpu.amx_allowed(), warnings=tuple(warnings))


def _usable(root: Path, affinity: Collection[int] | None, warnings: list[str]) -> set[int]:
    online = cpu.online(root)
    if affinity is None:
        return online
    if not online:
        warnings.append("/sys lists no CPUs: taking those this process may run on")
        return set(affinity)
    return online.intersection(affinity)
