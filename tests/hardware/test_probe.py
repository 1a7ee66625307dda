import os

import pytest

from epdd.hardware import sysfs
from epdd.hardware.probe import probe
from epdd.hardware.topology import Gpu, ranges
from tests.hardware.trees import tree, two_nodes


def test_two_nodes(tmp_path):
    found = probe(tree(tmp_path, two_nodes()))
    assert (found.sockets, found.cores, len(found.cpus), found.memory_bytes) == (2, 4, 8, 8 << 30)
    assert [(node.id, ranges(node.cpus), node.memory_bytes, node.distances) for node in found.nodes] == [
        (0, "0-1,4-5", 4 << 30, ((0, 10), (1, 21))), (1, "2-3,6-7", 4 << 30, ((0, 21), (1, 10)))]
    cpu = found.cpus[6]
    assert (cpu.id, cpu.core, cpu.socket, cpu.node, cpu.siblings) == (6, 2, 1, 1, (2, 6))
    assert (found.model, found.amx, found.bf16, found.warnings) == ("Xeon", True, True, ())


def test_affinity_narrows_everything(tmp_path):
    found = probe(tree(tmp_path, two_nodes()), affinity={1, 2, 6, 99})
    assert [cpu.id for cpu in found.cpus] == [1, 2, 6]
    assert [node.cpus for node in found.nodes] == [(1,), (2, 6)]
    assert (found.cores, found.cpus[0].siblings) == (2, (1,))


def test_a_cpuset_takes_memory_away(tmp_path):
    found = probe(tree(tmp_path, two_nodes() | {"proc/self/status": "Name:\tx\nMems_allowed_list:\t1"}))
    assert [(node.memory_bytes, node.has_memory) for node in found.nodes] == [(4 << 30, False), (4 << 30, True)]


def test_an_empty_tree_is_an_empty_topology(tmp_path):
    found = probe(tmp_path)
    assert (found.cpus, found.nodes, found.gpus, found.memory_bytes, found.flags) == ((), (), (), None, frozenset())


def test_without_sys_the_process_affinity_counts(tmp_path):
    found = probe(tmp_path, affinity={3, 5})
    assert [(cpu.id, cpu.core, cpu.node, cpu.siblings) for cpu in found.cpus] == [
        (3, 3, None, (3,)), (5, 5, None, (5,))]
    assert "lists no CPUs" in found.warnings[0]


def test_without_the_online_list_each_cpu_is_asked(tmp_path):
    base = "sys/devices/system/cpu"
    found = probe(tree(tmp_path, {f"{base}/cpu0/topology/core_id": "0", f"{base}/cpu1/online": "0",
                                  f"{base}/cpu2/online": "1", f"{base}/cpufreq/x": ""}))
    assert [cpu.id for cpu in found.cpus] == [0, 2]


def test_sparse_nodes_some_without_cpus_some_without_memory(tmp_path):
    base = "sys/devices/system/node"
    found = probe(tree(tmp_path, {
        "sys/devices/system/cpu/online": "0-3", f"{base}/online": "0,8,250", f"{base}/has_memory": "8,250",
        f"{base}/node0/cpulist": "0-1", f"{base}/node0/meminfo": "Node 0 MemTotal: 0 kB",
        f"{base}/node8/cpumap": "0000,0000000c", f"{base}/node250/cpulist": "",
        f"{base}/node250/meminfo": "Node 250 MemTotal: 1024 kB", f"{base}/node9/cpulist": "3"}))
    assert [(node.id, node.cpus, node.memory_bytes) for node in found.nodes] == [
        (0, (0, 1), 0), (8, (2, 3), None), (250, (), 1 << 20)]
    assert [node.has_memory for node in found.nodes] == [False, True, True]


def test_cpus_that_two_nodes_claim_are_in_none(tmp_path):
    base = "sys/devices/system/node"
    found = probe(tree(tmp_path, {"sys/devices/system/cpu/online": "0-2", f"{base}/node0/cpulist": "0-1",
                                  f"{base}/node1/cpulist": "1-2"}))
    assert [cpu.node for cpu in found.cpus] == [0, None, 1]
    assert "CPUs 1 are listed by several" in found.warnings[0]


@pytest.mark.parametrize("files, limit", [
    ({"proc/self/cgroup": "0::/a/b", "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0",
      "sys/fs/cgroup/a/memory.max": "1048576", "sys/fs/cgroup/a/b/memory.max": "max"}, 1 << 20),
    ({"proc/self/cgroup": "0::/on/the/host", "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0",
      "sys/fs/cgroup/memory.max": "2097152"}, 2 << 20),
    ({"proc/self/cgroup": "5:cpu:/\n4:memory:/job", "proc/mounts": "cgroup /cg/memory cgroup rw,memory 0 0",
      "cg/memory/job/memory.limit_in_bytes": "4194304", "cg/memory/memory.limit_in_bytes": "9223372036854771712"},
     4 << 20),
    ({"proc/self/cgroup": "garbage", "proc/mounts": "x"}, 8 << 30),
])
def test_memory_within_a_cgroup(tmp_path, files, limit):
    assert probe(tree(tmp_path, {"proc/meminfo": "MemTotal: 8388608 kB"} | files)).memory_bytes == limit


@pytest.mark.parametrize("content, numbers", [
    ("0-2,7", {0, 1, 2, 7}), ("", set()), ("5", {5}), ("3-1", None), ("a", None), ("0-4294967295", None), ("-1", None)])
def test_cpu_lists(content, numbers):
    assert sysfs.parse(content) == numbers


def test_ranges():
    assert ranges([5, 0, 1, 2, 2]) == "0-2,5"
    assert ranges([]) == ""


def test_known_gpus_are_kept(tmp_path):
    gpu = Gpu(0, "H200", 1, "0000:41:00.0", None, ())
    assert probe(tmp_path, gpus_known=(gpu,)).gpus == (gpu,)


def test_this_machine():
    found = probe()
    assert {cpu.id for cpu in found.cpus} == os.sched_getaffinity(0)
    assert found.memory_bytes
