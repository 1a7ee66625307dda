"""What a process is bound to, read from its folder in /proc: CPUs of its threads, memory policy, allowed nodes.

Of any process of the same user: so what is shown is what is in force, not what was once asked for.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from epdd.hardware import sysfs

SELF = Path("/proc/self")
LINE_BYTES = 256            # holds the address and the policy; asked for more, the kernel goes on to the next mappings


def folder(pid: int) -> Path:
    return Path(f"/proc/{pid}")


def threads(pid: int) -> dict[int, set[int]]:
    """The CPUs that each thread may run on, by thread id; empty when the process is gone."""
    found = {}
    for tid in sysfs.numbered(folder(pid) / "task", ""):
        try:
            found[tid] = os.sched_getaffinity(tid)
        except OSError:
            continue        # it ended meanwhile
    return found


def policy(process: Path = SELF) -> tuple[str, set[int]]:
    """The main thread's memory policy and its nodes, e.g. ("bind", {1}); ("", set()) where it cannot be read.

    A mapping without a policy of its own shows the main thread's, and the program's text, which is the first,
    never has one.  Only that line is read: the kernel walks the pages of each mapping it prints.
    """
    try:
        with (process / "numa_maps").open("rb", buffering=0) as file:
            told = file.read(LINE_BYTES).decode(errors="replace").split()[1]
    except (OSError, IndexError):
        return "", set()
    name, _, nodes = told.partition(":")
    return name.partition("=")[0], sysfs.parse(nodes) or set()      # "bind=static:0" has a flag in between


def allowed_nodes(process: Path = SELF) -> set[int]:
    """NUMA nodes that its cpuset and a binding policy (NUMAPolicy=) leave to it; empty where /proc does not say."""
    found = re.search(r"^Mems_allowed_list:\s*(\S+)", sysfs.text(process / "status") or "", re.MULTILINE)
    cpuset = (sysfs.parse(found[1]) or set()) if found else set()
    name, nodes = policy(process)
    return (cpuset & nodes if cpuset else nodes) if name == "bind" else cpuset


def memory_nodes(process: Path = SELF) -> tuple[int, ...]:
    """Where its memory is bound to: the policy's nodes, or the only one there is; empty: not bound."""
    name, nodes = policy(process)
    if name != "bind":
        nodes = allowed if len(allowed := allowed_nodes(process)) == 1 else set()
    return tuple(sorted(nodes))
