"""Reads NUMA nodes and memory, and how much of it this process may use."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from epdd.hardware import sysfs
from epdd.hardware.topology import HugePages, NumaNode


def read(sysroot: Path, usable: Collection[int], memory_allowed: Collection[int] | None = None) -> tuple[NumaNode, ...]:
    """All online NUMA nodes, ascending; ids may be sparse.  Empty on a kernel without NUMA."""
    folder = sysroot / "sys/devices/system/node"
    paths = sysfs.numbered(folder, "node")
    listed = sysfs.numbers(folder / "online")
    ids = [i for i in paths if listed is None or i in listed]
    with_memory = sysfs.numbers(folder / "has_memory")
    return tuple(
        NumaNode(id=i,
                 cpus=tuple(sorted(_cpus(paths[i]).intersection(usable))),
                 memory_bytes=0 if with_memory is not None and i not in with_memory else _meminfo(paths[i] / "meminfo"),
                 distances=_distances(paths[i], ids),
                 memory_allowed=memory_allowed is None or i in memory_allowed,
                 huge_pages=_huge_pages(paths[i] / "hugepages"))
        for i in ids)


def node_of_cpus(nodes: Collection[NumaNode]) -> tuple[dict[int, int], set[int]]:
    """NUMA node by CPU, and the CPUs that several nodes list (broken firmware), which count as in none."""
    owner: dict[int, int] = {}
    claimed_twice: set[int] = set()
    for node in nodes:
        for cpu in node.cpus:
            if cpu in owner:
                claimed_twice.add(cpu)
            owner[cpu] = node.id
    return {cpu: node for cpu, node in owner.items() if cpu not in claimed_twice}, claimed_twice


def memory(sysroot: Path, limit: int | None) -> int | None:
    """Bytes this process may use: the machine's memory, or a cgroup's limit if that is less."""
    known = [value for value in (_meminfo(sysroot / "proc/meminfo"), limit) if value is not None]
    return min(known, default=None)


def huge_pages(sysroot: Path) -> tuple[HugePages, ...]:
    """Reserved huge pages of the whole machine, by size."""
    return _huge_pages(sysroot / "sys/kernel/mm/hugepages")


def transparent_huge_pages(sysroot: Path) -> str:
    """The word in brackets of "always [madvise] never"; empty if not known."""
    found = re.search(r"\[(\w+)\]", sysfs.text(sysroot / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return found[1] if found else ""


def _cpus(path: Path) -> set[int]:
    """CPUs that the node lists, also those that are switched off.  Old kernels have cpumap but not cpulist."""
    listed = sysfs.numbers(path / "cpulist")
    return (sysfs.mask(path / "cpumap") or set()) if listed is None else listed


def _meminfo(path: Path) -> int | None:
    found = re.search(r"MemTotal:\s*(\d+) kB", sysfs.text(path) or "")
    return int(found[1]) * 1024 if found else None


def _distances(path: Path, ids: list[int]) -> tuple[tuple[int, int], ...]:
    """(NUMA node, distance); the file has one number for each online node, in order."""
    try:
        row = [int(part) for part in (sysfs.text(path / "distance") or "").split()]
    except ValueError:
        return ()
    return tuple(zip(ids, row)) if len(row) == len(ids) else ()


def _huge_pages(folder: Path) -> tuple[HugePages, ...]:
    """Sizes of which an administrator has reserved pages."""
    found = []
    for name in sysfs.names(folder):
        size = re.fullmatch(r"hugepages-(\d+)kB", name)
        total = sysfs.number(folder / name / "nr_hugepages")
        if size and total:
            free = sysfs.number(folder / name / "free_hugepages") or 0
            found.append(HugePages(int(size[1]) * 1024, total, free))
    return tuple(sorted(found, key=lambda pages: pages.page_bytes))
