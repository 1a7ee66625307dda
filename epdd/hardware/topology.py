"""What the machine has, as plain values: `probe` reads them, `placement` uses them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PERFORMANCE, EFFICIENCY = "P", "E"


@dataclass(frozen=True)
class Cpu:
    """One logical CPU that this process may run on."""

    id: int
    core: int                           # lowest logical CPU of the same physical core: unique in the machine
    socket: int                         # -1: not known
    node: int | None                    # its NUMA node; None: in none, or in several
    siblings: tuple[int, ...]           # usable logical CPUs of the same core, itself included
    kind: str = ""                      # on hybrid processors PERFORMANCE or EFFICIENCY; elsewhere empty


@dataclass(frozen=True)
class Cache:
    level: int
    size_bytes: int
    cpus: tuple[int, ...]               # usable CPUs that share it


@dataclass(frozen=True)
class HugePages:
    """Pages of one size that an administrator has reserved."""

    page_bytes: int
    total: int
    free: int


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node that is online, with or without CPUs and memory."""

    id: int
    cpus: tuple[int, ...]               # usable CPUs that the node lists
    memory_bytes: int | None            # 0: none; None: not known
    distances: tuple[tuple[int, int], ...] = ()     # (NUMA node, distance), 10 is local
    memory_allowed: bool = True         # False: a cpuset forbids this process the node's memory
    huge_pages: tuple[HugePages, ...] = ()

    @property
    def has_memory(self) -> bool:
        """Memory of this node can be bound to."""
        return self.memory_allowed and self.memory_bytes != 0

    def distance(self, node: int) -> int | None:
        return dict(self.distances).get(node)


@dataclass(frozen=True)
class Link:
    """How one GPU reaches another."""

    gpu: int                            # the other's index
    kind: str                           # "NVLink", or what lies between: "PCI switch", "sockets", ...
    peer: bool                          # each can read the other's memory


@dataclass(frozen=True)
class Gpu:
    index: int                          # NVML's: the order of PCI bus ids
    name: str
    memory_bytes: int
    bus_id: str                         # as in sysfs: 0000:41:00.0
    numa_node: int | None
    cpus: tuple[int, ...]               # usable CPUs near it; empty: not known
    links: tuple[Link, ...] = ()        # to other usable GPUs, as far as known


@dataclass(frozen=True)
class Topology:
    cpus: tuple[Cpu, ...]
    nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...] = ()
    memory_bytes: int | None = None     # what this process may use: the machine's or its cgroup's
    model: str = ""                     # of the first CPU
    flags: frozenset[str] = frozenset()     # of the first CPU, as in /proc/cpuinfo
    amx_allowed: bool = True            # False: the kernel does not let programs use the tiles
    warnings: tuple[str, ...] = ()
    offline: tuple[int, ...] = ()       # CPUs that are switched off
    barred: tuple[int, ...] = ()        # CPUs that are on, but that a cpuset or the affinity forbids
    cpu_quota: float | None = None      # CPU seconds a second that a cgroup allows; None: no limit
    caches: tuple[Cache, ...] = ()      # data and unified ones
    huge_pages: tuple[HugePages, ...] = ()
    transparent_huge_pages: str = ""    # the kernel's policy: always, madvise, never; empty: not known

    @property
    def sockets(self) -> int:
        return len({cpu.socket for cpu in self.cpus})

    @property
    def cores(self) -> int:
        """Physical cores."""
        return len({cpu.core for cpu in self.cpus})

    @property
    def amx(self) -> bool:
        """Whether AMX tiles for bfloat16 can be used."""
        return {"amx_tile", "amx_bf16"} <= self.flags and self.amx_allowed

    @property
    def avx512(self) -> bool:
        return "avx512f" in self.flags

    @property
    def bf16(self) -> bool:
        """Whether CPUs multiply bfloat16 in hardware; without, bfloat16 is far slower than float32."""
        return self.amx or "avx512_bf16" in self.flags

    @property
    def hybrid(self) -> bool:
        return len({cpu.kind for cpu in self.cpus}) > 1


def ranges(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 5} as "0-2,5"."""
    parts: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def plural(number: int, noun: str) -> str:
    """"1 core", "2 cores"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
