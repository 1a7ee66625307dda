"""Binds a worker to its CPUs and its NUMA node's memory, and reads back what the kernel really did.

To be called first thing in the child: CPU affinity set later reaches the main thread only, and memory that
is already touched stays where it is.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from epdd.wire import Binding, WorkerSpec

NODES = Path("/sys/devices/system/node")
# MPOL_BIND, not MPOL_PREFERRED: weights, cache and arena slice are touched before Ready, so a NUMA node that
# is too small shows at start, where PREFERRED would spill to remote memory and serve slowly without a word.
_MPOL_BIND = 2
_WORD = 64
_MASK_BITS = 1024           # MAX_NUMNODES of distribution kernels
_Mask = ctypes.c_ulong * (_MASK_BITS // _WORD)
_MAXNODE = ctypes.c_ulong(_MASK_BITS + 1)       # the kernel counts one less than it is told
_SET_MEMPOLICY, _GET_MEMPOLICY = 0, 1
_SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}


def bind(spec: WorkerSpec) -> Binding:
    """Bind this process; the answer is what is in force.  Never raises: faults are in `warning`."""
    warnings = []
    if spec.cpus:
        warnings.append(_bind_cpus(spec.cpus))
    if spec.numa_node is not None:
        warnings.append(_bind_memory(spec.numa_node))
    return Binding(cpus=tuple(sorted(os.sched_getaffinity(0))), mem_nodes=_memory_nodes(), threads=spec.threads,
                   warning="; ".join(filter(None, warnings)))


def _bind_cpus(cpus: Collection[int]) -> str:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        return f"CPUs {_listed(cpus)} not bound: {error.strerror}"
    # The kernel drops CPUs outside the cpuset without an error.
    missing = set(cpus) - os.sched_getaffinity(0)
    return f"CPUs {_listed(missing)} not bound: outside the allowed CPUs" if missing else ""


def _bind_memory(node: int) -> str:
    allowed = _allowed_nodes()
    if allowed == {node}:
        return ""           # the only memory there is: nothing to ask for, and so nothing to be denied
    # libnuma kills the process when the node is absent, so ask /sys first.
    if not (NODES / f"node{node}").is_dir():
        return f"memory not bound: there is no NUMA node {node}"
    if allowed and node not in allowed:
        return f"memory not bound: NUMA node {node} is outside the allowed nodes {_listed(allowed)}"
    denied = _set_policy(node)
    if _policy_nodes() == {node}:
        return ""
    # Containers filter set_mempolicy unless they are given this capability.
    return f"memory not bound to NUMA node {node}: {denied or 'no effect'}; set_mempolicy may need CAP_SYS_NICE"


def _set_policy(node: int) -> str:
    """Why it was denied, as far as it is told."""
    try:
        from numa import memory
    except (ImportError, AttributeError, OSError):      # AttributeError: the package without libnuma itself
        return _set_policy_by_syscall(node)
    try:
        memory.set_membind_nodes(node)
    except Exception as error:      # its own plain Exception is all that py-libnuma documents
        return str(error)
    # libnuma prints a denial and returns, so only the policy itself tells; the syscall gives the reason.
    return "" if _policy_nodes() == {node} else _set_policy_by_syscall(node)


def _set_policy_by_syscall(node: int) -> str:
    if node >= _MASK_BITS:
        return "the node's number is too large"
    mask = _Mask()
    mask[node // _WORD] = 1 << node % _WORD
    return _syscall(_SET_MEMPOLICY, ctypes.c_long(_MPOL_BIND), mask, _MAXNODE)


def _policy_nodes() -> set[int]:
    """Nodes of this thread's memory policy; empty under the default policy or where it cannot be read."""
    mask = _Mask()
    if _syscall(_GET_MEMPOLICY, None, mask, _MAXNODE, None, ctypes.c_long(0)):
        return set()
    return {i for i in range(_MASK_BITS) if mask[i // _WORD] >> i % _WORD & 1}


def _syscall(name: int, *args: Any) -> str:
    """Why the call failed, or nothing."""
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        return f"system call numbers of {platform.machine()} are not known"
    libc = ctypes.CDLL(None, use_errno=True)
    return os.strerror(ctypes.get_errno()) if libc.syscall(ctypes.c_long(numbers[name]), *args) else ""


def _memory_nodes() -> tuple[int, ...]:
    """The policy's nodes, or the only node that memory can come from; empty: not bound."""
    allowed = _allowed_nodes()
    nodes = _policy_nodes() or (allowed if len(allowed) == 1 else set())
    return tuple(sorted(nodes))


def _allowed_nodes() -> set[int]:
    """Nodes that a cpuset lets this process use, from /proc; empty where it does not say."""
    try:
        found = re.search(r"^Mems_allowed_list:\s*(\S+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return set()
    nodes: set[int] = set()
    for part in found[1].split(",") if found else ():
        low, _, high = part.partition("-")
        nodes.update(range(int(low), int(high or low) + 1))
    return nodes


def _listed(numbers: Collection[int]) -> str:
    return ",".join(map(str, sorted(numbers)))
