"""Logical CPUs: which are usable, which share a core, what they can compute."""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Collection, Mapping
from pathlib import Path

from epdd.hardware import sysfs
from epdd.hardware.topology import Cpu

# arch_prctl(ARCH_GET_XCOMP_SUPP) asks which processor states the kernel supports without requesting any
# (asking for the permission would change this process); bit 18 is AMX's tile data.
_SYS_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_SUPP = 0x1021
_XTILEDATA = 1 << 18


def online(sysroot: Path) -> set[int]:
    """CPUs that are switched on.  Empty where /sys tells nothing."""
    folder = sysroot / "sys/devices/system/cpu"
    listed = sysfs.numbers(folder / "online")
    if listed:
        return listed
    # Without the list each CPU says so itself; one that cannot be switched off has no file.
    return {i for i, path in sysfs.numbered(folder, "cpu").items()
            if sysfs.number(path / "online") != 0}


def read(sysroot: Path, usable: Collection[int], node_of: Mapping[int, int]) -> tuple[Cpu, ...]:
    """One Cpu for each of `usable`, ascending."""
    return tuple(_cpu(sysroot, i, usable, node_of.get(i)) for i in sorted(usable))


def _cpu(sysroot: Path, index: int, usable: Collection[int], node: int | None) -> Cpu:
    folder = sysroot / f"sys/devices/system/cpu/cpu{index}/topology"
    socket = sysfs.number(folder / "physical_package_id")
    # core_id repeats on every socket and die, so the sibling list is what tells cores apart.
    # The list has three names: the first since Linux 5.3, the last before 2.6.26.
    shared = (sysfs.numbers(folder / "core_cpus_list") or sysfs.numbers(folder / "thread_siblings_list")
              or sysfs.mask(folder / "thread_siblings") or set())
    if index not in shared:
        shared = {index}
    return Cpu(id=index, core=min(shared), socket=-1 if socket is None else socket, node=node,
               siblings=tuple(sorted(shared.intersection(usable))))


def model_and_flags(sysroot: Path) -> tuple[str, frozenset[str]]:
    """Name and feature flags of the first CPU in /proc/cpuinfo; empty where it does not say."""
    fields: dict[str, str] = {}
    for line in (sysfs.text(sysroot / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
        if "flags" in fields and "model name" in fields:
            break
    flags = fields.get("flags") or fields.get("features") or ""
    return fields.get("model name") or fields.get("cpu") or "", frozenset(flags.split())


def amx_allowed() -> bool:
    """The running kernel lets programs use AMX tiles."""
    if platform.machine() != "x86_64":
        return False
    found = ctypes.create_string_buffer(8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, found) != 0:
        return False
    return bool(struct.unpack("=Q", found.raw)[0] & _XTILEDATA)
