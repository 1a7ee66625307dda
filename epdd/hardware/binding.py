"""Reads from /proc what a process is bound to: CPUs of its threads, memory policy, allowed NUMA nodes.

Works for any process of the same user, so status shows what is in force and not what was asked for.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from epdd.hardware import sysfs

SELF = Path("/proc/self")
LINE_BYTES = 256            # enough for address and policy; for a longer read the kernel walks the next mappings too


def folder(pid: int) -> Path:
    return Path(f"/proc/{pid}")


def threads(pid: int) -> dict[int, set[int]]:
    """The CPUs that each thread may run on, by thread id; empty when the process is gone."""
    found = {}
    for tid in sysfs.numbered(folder(pid) / "task", ""):
        try:
            found[tid] = os.sched_getaffinity(tid)
        except OSError:
            continue        # the thread has ended
    return found


def policy(process: Path = SELF) -> tuple[str, set[int]]:
    """The main thread's memory policy and its nodes, e.g. ("bind", {1}); ("", set()) if it cannot be read.

    A mapping without a policy of its own shows the main thread's.  The first mapping, the program's text, never has
    one.  Only its line is read: the kernel walks the pages of each mapping that it prints.
    """
    try:
        with (process / "numa_maps").open("rb", buffering=0) as file:
            told = file.read(LINE_BYTES).decode(errors="replace").split()[1]
    except (OSError, IndexError):
        return "", set()
    name, _, nodes = told.partition(":")
    return name.partition("=")[0], sysfs.parse(nodes) or set()      # "bind=static:0" has a flag in between


def allowed_nodes(process: Path = SELF) -> set[int]:
    """NUMA nodes that its cpuset and a binding policy (NUMAPolicy=) allow; empty if /proc does not say."""
    found = re.search(r"^Mems_allowed_list:\s*(\S+)", sysfs.text(process / "status") or "", re.MULTILINE)
    cpuset = (sysfs.parse(found[1]) or set()) if found else set()
    name, nodes = policy(process)
    return (cpuset & nodes if cpuset else nodes) if name == "bind" else cpuset


def memory_nodes(process: Path = SELF) -> tuple[int, ...]:
    """NUMA nodes that its memory is bound to: the policy's, or the only allowed one; empty: not bound."""
    name, nodes = policy(process)
    if name != "bind":
        nodes = allowed if len(allowed := allowed_nodes(process)) == 1 else set()
    return tuple(sorted(nodes))
