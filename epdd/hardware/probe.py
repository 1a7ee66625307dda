"""Reads the machine into a Topology.  Missing or malformed files leave out facts and never raise."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from epdd.hardware import cgroup, cpu, gpus, nodes
from epdd.hardware.topology import Gpu, Topology, ranges


def probe(sysroot: str | Path = "/", affinity: Collection[int] | None = None,
          gpus_known: tuple[Gpu, ...] | None = None) -> Topology:
    """The machine below `sysroot`, reduced to what this process may use.

    `affinity` limits the CPUs (None: this process's own on the live system, the recorded cpuset on a saved one).
    `gpus_known` replaces NVML, which only the live system has.
    """
    root = Path(sysroot)
    live = root.resolve() == Path("/")
    limits = cgroup.read(root)
    if affinity is None:
        affinity = os.sched_getaffinity(0) if live else limits.cpus
    warnings: list[str] = []
    online = cpu.online(root)
    usable = _usable(online, affinity, warnings)
    numa = nodes.read(root, usable, limits.memory_nodes)
    node_of, claimed_twice = nodes.node_of_cpus(numa)
    if claimed_twice:
        warnings.append(f"CPUs {ranges(claimed_twice)} are listed by several NUMA nodes: taken as in none")
    found: tuple[Gpu, ...] = gpus_known or ()
    if gpus_known is None and live:
        found, more = gpus.read(root, usable, numa)
        warnings += more
    model, flags = cpu.model_and_flags(root)
    return Topology(
        cpus=cpu.read(root, usable, node_of), nodes=numa, gpus=found,
        memory_bytes=nodes.memory(root, limits.memory_bytes), model=model, flags=flags,
        amx_allowed=not live or "amx_tile" not in flags or cpu.amx_allowed(), warnings=tuple(warnings),
        offline=tuple(sorted(cpu.present(root) - online)), barred=tuple(sorted(online - usable)),
        cpu_quota=limits.cpu_quota, caches=cpu.caches(root, usable), huge_pages=nodes.huge_pages(root),
        transparent_huge_pages=nodes.transparent_huge_pages(root))


def _usable(online: set[int], affinity: Collection[int] | None, warnings: list[str]) -> set[int]:
    if affinity is None:
        return online
    if not online:
        warnings.append("/sys lists no CPUs: taking those this process may run on")
        return set(affinity)
    return online.intersection(affinity)
