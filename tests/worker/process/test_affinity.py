"""In children: a binding cannot be undone, and a wrong call into libnuma kills its process."""

import json
import os
import platform
import subprocess
import sys

import pytest

CHILD = """
import json, os, sys
{before}
from epdd.wire import WorkerSpec
from epdd.worker.process import affinity
{patch}
cpus, node, threads = json.loads(sys.argv[1])
found = affinity.bind(WorkerSpec("encoder/0", "encoder", "cpu", tuple(cpus), node, threads, "/m"))
name, nodes = affinity.binding.policy()
print(json.dumps([found.cpus, found.mem_nodes, found.threads, found.warning, [name, *nodes]]))
"""
# A system call filter as a container or a unit has it: {number} fails with EPERM.
DENY = """
import ctypes, struct
code = struct.pack("=" + "HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, {number}, 6, 0, 0, 0x50001, 6, 0, 0, 0x7fff0000)
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(code)
program = struct.pack("@HP", 4, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
"""
CALLS = {"x86_64": (238, 203), "aarch64": (237, 122)}       # set_mempolicy, sched_setaffinity
CPU = min(os.sched_getaffinity(0))
# As if the machine had more memory nodes, so that binding is really tried.
SEVERAL = "affinity.binding.allowed_nodes = lambda process=None: {0, 1}"


def bind(cpus, node, before="", patch="", threads=1):
    program = CHILD.format(before=before, patch=patch)
    run = subprocess.run([sys.executable, "-c", program, json.dumps([cpus, node, threads])],
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_cpus_are_bound_and_read_back():
    assert bind([CPU], 0)[0] == [CPU]
    assert bind([CPU], 0)[3] == ""


def test_no_binding_asked_for():
    assert bind([], None)[0] == sorted(os.sched_getaffinity(0))


def test_cpus_the_kernel_drops_are_told():
    cpus, _, _, warning, _ = bind([CPU, 8000], None)
    assert cpus == [CPU]
    assert warning == "CPUs 8000 not bound: outside the allowed CPUs"


def test_absent_cpus_are_told():
    assert bind([8000], None)[3] == "CPUs 8000 not bound: Invalid argument"


def test_absent_node_is_told_and_libnuma_is_not_asked():
    assert bind([CPU], 999, patch=SEVERAL)[3] == "memory not bound: there is no NUMA node 999"


@pytest.mark.parametrize("before", ["", "sys.modules['numa'] = None"], ids=["py-libnuma", "syscall"])
def test_memory_policy(before):
    _, nodes, _, warning, policy = bind([CPU], 0, before=before, patch=SEVERAL)
    assert (nodes, warning, policy) == ([0], "", ["bind", 0])


def test_the_only_memory_node_needs_no_policy():
    _, nodes, _, warning, policy = bind([CPU], 0, patch=SEVERAL.replace("{0, 1}", "{0}"))
    assert (nodes, warning, policy) == ([0], "", ["default"])


def test_a_node_outside_the_cpuset_is_told():
    _, _, _, warning, policy = bind([CPU], 0, patch=SEVERAL.replace("{0, 1}", "{1, 2}"))
    assert warning == "memory not bound: NUMA node 0 is outside the allowed nodes 1-2"
    assert policy == ["default"], "the inherited one was left"


def test_denied_policy_names_the_capability():
    deny = DENY.format(number=CALLS[platform.machine()][0])
    _, nodes, _, warning, policy = bind([CPU], 0, before=deny, patch=SEVERAL)
    assert warning == "memory not bound to NUMA node 0: Operation not permitted; set_mempolicy may need CAP_SYS_NICE"
    assert (nodes, policy) == ([], ["default"])


def test_denied_affinity_names_the_filter():
    cpus, _, threads, warning, _ = bind([CPU], None, before=DENY.format(number=CALLS[platform.machine()][1]))
    assert warning == (f"CPUs {CPU} not bound: Operation not permitted; "
                       "a system call filter may deny sched_setaffinity (systemd: @resources)")
    assert (cpus, threads) == (sorted(os.sched_getaffinity(0)), 1)


def test_no_more_threads_than_cpus_in_force():
    assert bind([CPU, 8000], None, threads=2)[2] == 1
