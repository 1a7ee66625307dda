"""NUMA nodes and memory: what is there and how much of it this process may use."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from epdd.hardware import binding, sysfs
from epdd.hardware.topology import NumaNode

_UNLIMITED = 1 << 60        # cgroup v1 writes a number near 2^63 for "no limit"


def read(sysroot: Path, usable: Collection[int]) -> tuple[NumaNode, ...]:
    """All online NUMA nodes, ascending; ids may be sparse.  Empty on a kernel without NUMA."""
    folder = sysroot / "sys/devices/system/node"
    paths = sysfs.numbered(folder, "node")
    listed = sysfs.numbers(folder / "online")
    ids = [i for i in paths if listed is None or i in listed]
    with_memory = sysfs.numbers(folder / "has_memory")
    allowed = binding.allowed_nodes(sysroot / "proc/self") or None
    return tuple(
        NumaNode(id=i,
                 cpus=tuple(sorted(_cpus(paths[i]).intersection(usable))),
                 memory_bytes=_memory(paths[i], i, with_memory, allowed),
                 distances=_distances(paths[i], ids))
        for i in ids)


def node_of_cpus(nodes: Collection[NumaNode]) -> tuple[dict[int, int], set[int]]:
    """NUMA node by CPU, and the CPUs that several nodes claim (broken firmware), which are in none."""
    owner: dict[int, int] = {}
    claimed_twice: set[int] = set()
    for node in nodes:
        for cpu in node.cpus:
            if cpu in owner:
                claimed_twice.add(cpu)
            owner[cpu] = node.id
    return {cpu: node for cpu, node in owner.items() if cpu not in claimed_twice}, claimed_twice


def memory(sysroot: Path) -> int | None:
    """Bytes this process may use: the machine's memory, or less where a cgroup limits it."""
    total = _meminfo(sysroot / "proc/meminfo")
    known = [value for value in (total, _cgroup_limit(sysroot)) if value is not None]
    return min(known, default=None)


def _cpus(path: Path) -> set[int]:
    """CPUs as the node lists them, also those that are switched off.  cpulist is younger than cpumap."""
    listed = sysfs.numbers(path / "cpulist")
    return (sysfs.mask(path / "cpumap") or set()) if listed is None else listed


def _memory(path: Path, node: int, with_memory: set[int] | None, allowed: set[int] | None) -> int | None:
    if allowed is not None and node not in allowed or with_memory is not None and node not in with_memory:
        return 0
    return _meminfo(path / "meminfo")


def _meminfo(path: Path) -> int | None:
    found = re.search(r"MemTotal:\s*(\d+) kB", sysfs.text(path) or "")
    return int(found[1]) * 1024 if found else None


def _distances(path: Path, ids: list[int]) -> tuple[tuple[int, int], ...]:
    """The file has one number for each online node, in order."""
    try:
        row = [int(part) for part in (sysfs.text(path / "distance") or "").split()]
    except ValueError:
        return ()
    return tuple(zip(ids, row)) if len(row) == len(ids) else ()


def _cgroup_limit(sysroot: Path) -> int | None:
    """The least memory limit from this process's cgroup up to the root: each of them binds."""
    limits = []
    for line in (sysfs.text(sysroot / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "/")
        if controllers == "":
            mount, name = _cgroup_mount(sysroot, "cgroup2", ""), "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = _cgroup_mount(sysroot, "cgroup", "memory"), "memory.limit_in_bytes"
        else:
            continue
        if mount is None:
            continue
        # Inside a container the path may be the host's; the levels that are not here are skipped.
        own = mount / path.lstrip("/")
        limits += [sysfs.number(level / name) for level in (own, *own.parents) if level.is_relative_to(mount)]
    return min((limit for limit in limits if limit is not None and limit < _UNLIMITED), default=None)


def _cgroup_mount(sysroot: Path, kind: str, option: str) -> Path | None:
    for line in (sysfs.text(sysroot / "proc/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) >= 4 and fields[2] == kind and (not option or option in fields[3].split(",")):
            return sysroot / fields[1].lstrip("/")
    return None
