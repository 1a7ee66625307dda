"""Logical CPUs: which are usable, which share a core, what they can compute."""

from __future__ import annotations

import ctypes
import platform
import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from epdd.hardware import sysfs
from epdd.hardware.topology import EFFICIENCY, PERFORMANCE, Cache, Cpu

# arch_prctl(ARCH_GET_XCOMP_SUPP) lists the processor states that the kernel supports, without requesting permission
# for any (which would change this process).  Bit 18 is AMX's tile data.
_SYS_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_SUPP = 0x1021
_XTILEDATA = 1 << 18


def online(sysroot: Path) -> set[int]:
    """CPUs that are switched on; empty if /sys does not say."""
    folder = sysroot / "sys/devices/system/cpu"
    listed = sysfs.numbers(folder / "online")
    if listed:
        return listed
    # Without the list, each CPU has a file of its own, except those that cannot be switched off.
    return {i for i, path in sysfs.numbered(folder, "cpu").items()
            if sysfs.number(path / "online") != 0}


def present(sysroot: Path) -> set[int]:
    """CPUs that exist, on or off; empty if /sys does not list them."""
    return sysfs.numbers(sysroot / "sys/devices/system/cpu/present") or set()


def read(sysroot: Path, usable: Collection[int], node_of: Mapping[int, int]) -> tuple[Cpu, ...]:
    """One Cpu for each of `usable`, ascending."""
    cores = {i: _core(sysroot, i) for i in sorted(usable)}
    kind_of = _kinds(sysroot, cores)
    found = []
    for i, core in cores.items():
        socket = sysfs.number(sysroot / f"sys/devices/system/cpu/cpu{i}/topology/physical_package_id")
        found.append(Cpu(id=i, core=min(core), socket=-1 if socket is None else socket, node=node_of.get(i),
                         siblings=tuple(sorted(core.intersection(usable))), kind=kind_of.get(i, "")))
    return tuple(found)


def _core(sysroot: Path, index: int) -> set[int]:
    """All logical CPUs of one physical core."""
    folder = sysroot / f"sys/devices/system/cpu/cpu{index}/topology"
    # core_id repeats on every socket and die, so cores are identified by their list of siblings.
    # The list has three names: the first since Linux 5.3, the last before 2.6.26.
    shared = (sysfs.numbers(folder / "core_cpus_list") or sysfs.numbers(folder / "thread_siblings_list")
              or sysfs.mask(folder / "thread_siblings") or set())
    return shared if index in shared else {index}


def _kinds(sysroot: Path, cores: Mapping[int, set[int]]) -> dict[int, str]:
    """PERFORMANCE or EFFICIENCY by CPU; empty if all cores are of one kind.

    Intel's drivers list the two kinds; Arm, and newer kernels on all machines, give each CPU a capacity.
    """
    devices = sysroot / "sys/devices"
    slow = (sysfs.numbers(devices / "cpu_atom/cpus") or set()) | (sysfs.numbers(devices / "cpu_lowpower/cpus") or set())
    if not slow:
        slow = _slower(cores, lambda i: devices / f"system/cpu/cpu{i}/cpu_capacity")
    if not slow and len({len(core) for core in cores.values()}) > 1:
        # Older kernels: efficiency cores lack hyperthreads and have a lower base frequency.  The frequency alone does
        # not tell: servers can give some of their equal cores a higher one.
        slow = _slower(cores, lambda i: devices / f"system/cpu/cpufreq/policy{i}/base_frequency")
    if not slow & set(cores) or slow >= set(cores):
        return {}
    return {i: EFFICIENCY if i in slow else PERFORMANCE for i in cores}


def _slower(cpus: Iterable[int], path: Callable[[int], Path]) -> set[int]:
    """CPUs whose number is below three quarters of the largest; fast cores differ by a few percent among each other."""
    numbers = {i: sysfs.number(path(i)) or 0 for i in cpus}
    largest = max(numbers.values(), default=0)
    return {i for i, number in numbers.items() if number * 4 < largest * 3}


def caches(sysroot: Path, usable: Collection[int]) -> tuple[Cache, ...]:
    """Data and unified caches, each listed once, by level."""
    found: dict[tuple[int, tuple[int, ...]], Cache] = {}
    for i in sorted(usable):
        for folder in sysfs.numbered(sysroot / f"sys/devices/system/cpu/cpu{i}/cache", "index").values():
            level, size = sysfs.number(folder / "level"), re.fullmatch(r"(\d+)K", sysfs.text(folder / "size") or "")
            if level is None or size is None or sysfs.text(folder / "type") == "Instruction":
                continue
            shared = sysfs.numbers(folder / "shared_cpu_list") or sysfs.mask(folder / "shared_cpu_map") or {i}
            cpus = tuple(sorted(shared.intersection(usable)))
            found.setdefault((level, cpus), Cache(level, int(size[1]) * 1024, cpus))
    return tuple(sorted(found.values(), key=lambda cache: (cache.level, cache.cpus)))


def model_and_flags(sysroot: Path) -> tuple[str, frozenset[str]]:
    """Name and feature flags of the first CPU in /proc/cpuinfo; empty if it does not say."""
    fields: dict[str, str] = {}
    for line in (sysfs.text(sysroot / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
        if "flags" in fields and "model name" in fields:
            break
    flags = fields.get("flags") or fields.get("features") or ""
    return fields.get("model name") or fields.get("cpu") or "", frozenset(flags.split())


def amx_allowed() -> bool:
    """Whether the running kernel lets programs use AMX tiles."""
    if platform.machine() != "x86_64":
        return False
    found = ctypes.create_string_buffer(8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, found) != 0:
        return False
    return bool(struct.unpack("=Q", found.raw)[0] & _XTILEDATA)
