"""Limits that control groups set for this process: CPUs, memory nodes, memory, CPU time.  Versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from epdd.hardware import binding, sysfs

_UNLIMITED = 1 << 60        # version 1 writes a number near 2^63 for "no limit"


@dataclass(frozen=True)
class CgroupLimits:
    """None: no limit, or not known."""

    cpus: set[int] | None = None
    memory_nodes: set[int] | None = None
    memory_bytes: int | None = None
    cpu_quota: float | None = None      # CPUs' worth of time


def read(sysroot: Path) -> CgroupLimits:
    """The tightest limits of this process's group and all groups above it."""
    cpus, nodes = _cpuset(sysroot)
    memory = [sysfs.number(level / name) for level in _levels(sysroot, "memory")
              for name in ("memory.max", "memory.limit_in_bytes")]
    return CgroupLimits(
        cpus=cpus, memory_nodes=nodes,
        memory_bytes=min((limit for limit in memory if limit is not None and limit < _UNLIMITED), default=None),
        cpu_quota=min(filter(None, map(_quota, _levels(sysroot, "cpu"))), default=None))


def oom_kills_file(sysroot: Path, pid: int) -> Path | None:
    """The file in which the kernel counts out-of-memory kills in the group of process `pid`."""
    files = (level / name for level in _levels(sysroot, "memory", str(pid))
             for name in ("memory.events", "memory.oom_control"))
    return next((file for file in files if oom_kills(file) is not None), None)


def oom_kills(file: Path) -> int | None:
    """The number of kills in that file; None if it has none."""
    lines = (line.split() for line in (sysfs.text(file) or "").splitlines())
    return next((int(line[1]) for line in lines if len(line) == 2 and line[0] == "oom_kill" and line[1].isdecimal()),
                None)


def _cpuset(sysroot: Path) -> tuple[set[int] | None, set[int] | None]:
    """CPUs and memory nodes of the nearest level; its effective sets already respect the levels above."""
    cpus = nodes = None
    for level in _levels(sysroot, "cpuset"):
        # Version 2, version 1, and version 1 mounted as the "cpuset" filesystem it once was.
        for prefix, suffix in (("cpuset.", ".effective"), ("cpuset.effective_", ""), ("cpuset.", ""), ("", "")):
            cpus = cpus or sysfs.numbers(level / f"{prefix}cpus{suffix}")
            nodes = nodes or sysfs.numbers(level / f"{prefix}mems{suffix}")
    # /proc/self/status has the kernel's result; a binding memory policy (NUMAPolicy=) reduces it further.
    return cpus, binding.allowed_nodes(sysroot / "proc/self") or nodes


def _quota(level: Path) -> float | None:
    fields = (sysfs.text(level / "cpu.max") or "").split()
    if len(fields) == 2 and all(field.isdecimal() for field in fields):
        quota, period = map(int, fields)
    else:
        quota, period = sysfs.number(level / "cpu.cfs_quota_us") or 0, sysfs.number(level / "cpu.cfs_period_us") or 0
    return quota / period if quota > 0 and period > 0 else None


def _levels(sysroot: Path, controller: str, process: str = "self") -> Iterator[Path]:
    """Folders of a process's group for a controller, from its own up to the mount."""
    for kind, options, mount in _mounts(sysroot):
        if kind == "cgroup2":
            path = _group(sysroot, "", process)
        elif kind == "cgroup" and controller in options or kind == "cpuset" == controller:
            path = _group(sysroot, controller, process)
        else:
            continue
        if path is None:
            # Old kernels have only this file, which has the cpuset's path.
            path = (sysfs.text(sysroot / "proc/self/cpuset") or "/") if controller == "cpuset" else "/"
        # Inside a container the path may be the host's; levels that do not exist here have no files.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _mounts(sysroot: Path) -> list[tuple[str, list[str], Path]]:
    """(filesystem, options, folder) of every mounted control group hierarchy."""
    lines = [line.split() for line in (sysfs.text(sysroot / "proc/mounts") or "").splitlines()]
    return [(fields[2], fields[3].split(","), sysroot / fields[1].lstrip("/"))
            for fields in lines if len(fields) >= 4 and fields[2] in ("cgroup", "cgroup2", "cpuset")]


def _group(sysroot: Path, controller: str, process: str) -> str | None:
    for line in (sysfs.text(sysroot / "proc" / process / "cgroup") or "").splitlines():
        _, found, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
        if controller in found.split(","):
            return path
    return None
