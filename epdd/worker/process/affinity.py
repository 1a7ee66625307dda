"""Binds a worker to its CPUs and its NUMA node's memory, and reads back what the kernel really did.

To be called first thing in the child: CPU affinity set later reaches the main thread only, and memory that
is already touched stays where it is.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection
from pathlib import Path

from epdd.hardware import binding
from epdd.hardware.topology import ranges
from epdd.wire import Binding, WorkerSpec

NODES = Path("/sys/devices/system/node")
# MPOL_BIND, not MPOL_PREFERRED: weights, cache and arena slice are touched before Ready, so a NUMA node that
# is too small shows at start; PREFERRED would use remote memory and serve slowly without a warning.
_MPOL_BIND = 2
_WORD = 64
_MASK_BITS = 1024           # MAX_NUMNODES of distribution kernels
_Mask = ctypes.c_ulong * (_MASK_BITS // _WORD)
_MAXNODE = ctypes.c_ulong(_MASK_BITS + 1)       # the kernel counts one less than it is told
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
# A container's filter refuses set_mempolicy unless the container has this capability.
_MEMORY_HINT = "set_mempolicy may need CAP_SYS_NICE"
_CPUS_HINT = "a system call filter may deny sched_setaffinity (systemd: @resources)"


def bind(spec: WorkerSpec) -> Binding:
    """Bind this process; the answer is what is in force.  Never raises: faults are in `warning`."""
    warnings = []
    if spec.cpus:
        warnings.append(_bind_cpus(spec.cpus))
    if spec.numa_node is not None:
        warnings.append(_bind_memory(spec.numa_node))
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    # More threads than CPUs would wait for each other in every product.
    return Binding(cpus=cpus, mem_nodes=binding.memory_nodes(), threads=max(1, min(spec.threads, len(cpus))),
                   warning="; ".join(filter(None, warnings)))


def _bind_cpus(cpus: Collection[int]) -> str:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        hint = f"; {_CPUS_HINT}" if isinstance(error, PermissionError) else ""
        return f"CPUs {ranges(cpus)} not bound: {error.strerror}{hint}"
    # The kernel drops CPUs outside the cpuset without an error.
    missing = set(cpus) - os.sched_getaffinity(0)
    return f"CPUs {ranges(missing)} not bound: outside the allowed CPUs" if missing else ""


def _bind_memory(node: int) -> str:
    allowed = binding.allowed_nodes()
    if allowed == {node}:
        return ""           # the only memory there is: nothing to ask for
    # libnuma kills the process when the node is absent, so ask /sys first.
    if not (NODES / f"node{node}").is_dir():
        return f"memory not bound: there is no NUMA node {node}"
    # An inherited policy is the operator's decision, like a cpuset, though the kernel would let us leave it.
    if allowed and node not in allowed:
        return f"memory not bound: NUMA node {node} is outside the allowed nodes {ranges(allowed)}"
    denied = _set_policy(node)
    if binding.policy() == ("bind", {node}):
        return ""
    return f"memory not bound to NUMA node {node}: {denied or 'no effect'}; {_MEMORY_HINT}"


def _set_policy(node: int) -> str:
    """Why it was denied; empty: it was not, or the reason is not known."""
    try:
        from numa import memory
    except (ImportError, AttributeError, OSError):      # AttributeError: the package without libnuma itself
        return _set_policy_by_syscall(node)
    try:
        memory.set_membind_nodes(node)
    except Exception as error:      # its own plain Exception is all that py-libnuma documents
        return str(error)
    # libnuma prints a denial and returns, so only the policy itself tells; the syscall gives the reason.
    return "" if binding.policy() == ("bind", {node}) else _set_policy_by_syscall(node)


def _set_policy_by_syscall(node: int) -> str:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"the system call's number on {platform.machine()} is not known"
    if node >= _MASK_BITS:
        return "the node's number is too large"
    mask = _Mask()
    mask[node // _WORD] = 1 << node % _WORD
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(ctypes.c_long(number), ctypes.c_long(_MPOL_BIND), mask, _MAXNODE)
    return os.strerror(ctypes.get_errno()) if failed else ""
