import os
from dataclasses import replace

import pytest

from epdd.hardware import sysfs
from epdd.hardware.probe import probe
from epdd.hardware.topology import Gpu, HugePages, ranges
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


def test_several_nodes_in_one_socket(tmp_path):
    """Sub-NUMA clustering, and core ids that repeat on every die."""
    files = two_nodes() | {f"sys/devices/system/cpu/cpu{i}/topology/{name}": "0" for i in range(8)
                           for name in ("physical_package_id", "core_id")}
    found = probe(tree(tmp_path, files))
    assert (found.sockets, len(found.nodes), found.cores) == (1, 2, 4)


def test_a_node_is_off_with_its_cpu0_and_leaves_cpus_without_a_node(tmp_path):
    """Lists of nodes name offline CPUs; CPUs 1 and 2 are online, but their node is not."""
    base = "sys/devices/system"
    found = probe(tree(tmp_path, {f"{base}/cpu/online": "1-2,5", f"{base}/cpu/present": "0-7",
                                  f"{base}/node/online": "1", f"{base}/node/node1/cpulist": "4-7",
                                  f"{base}/node/node0/cpulist": "0-3"}))
    assert [(cpu.id, cpu.node) for cpu in found.cpus] == [(1, None), (2, None), (5, 1)]
    assert [(node.id, node.cpus) for node in found.nodes] == [(1, (5,))]
    assert found.offline == (0, 3, 4, 6, 7)


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


V2 = {"proc/self/cgroup": "0::/a/b", "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/job\n4:cpuset:/job",
      "proc/mounts": "cgroup /cg/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup /cg/cpuset cgroup rw,cpuset 0 0"}


@pytest.mark.parametrize("files, cpus, nodes", [
    (V2 | {"sys/fs/cgroup/a/b/cpuset.cpus.effective": "1-2", "sys/fs/cgroup/a/b/cpuset.mems.effective": "0",
           "sys/fs/cgroup/cpuset.cpus.effective": "0-7"}, [1, 2], [0]),
    (V2 | {"sys/fs/cgroup/a/cpuset.cpus.effective": "4-5", "sys/fs/cgroup/a/b/memory.max": "max"}, [4, 5], [0, 1]),
    (V1 | {"cg/cpuset/job/cpuset.cpus": "0-7", "cg/cpuset/job/cpuset.effective_cpus": "6-7,99",
           "cg/cpuset/job/cpuset.mems": "1"}, [6, 7], [1]),
    ({"proc/self/cpuset": "/dummy", "proc/mounts": "none /dev/cpuset cpuset rw 0 0", "dev/cpuset/dummy/cpus": "0,3",
      "dev/cpuset/dummy/mems": "0-1"}, [0, 3], [0, 1]),
    (V2, list(range(8)), [0, 1]),
])
def test_a_saved_machine_keeps_its_cpuset(tmp_path, files, cpus, nodes):
    found = probe(tree(tmp_path, two_nodes() | files))
    assert [cpu.id for cpu in found.cpus] == cpus
    assert found.barred == tuple(sorted(set(range(8)) - set(cpus)))
    assert [node.id for node in found.nodes if node.has_memory] == nodes


@pytest.mark.parametrize("files, quota", [
    (V2 | {"sys/fs/cgroup/a/cpu.max": "250000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 2.5),
    (V2 | {"sys/fs/cgroup/a/cpu.max": "250000 100000", "sys/fs/cgroup/a/b/cpu.max": "50000 100000"}, 0.5),
    (V1 | {"cg/cpu/job/cpu.cfs_quota_us": "400000", "cg/cpu/job/cpu.cfs_period_us": "100000"}, 4.0),
    (V1 | {"cg/cpu/job/cpu.cfs_quota_us": "-1", "cg/cpu/job/cpu.cfs_period_us": "100000"}, None),
    (V2 | {"sys/fs/cgroup/a/cpu.max": "nonsense"}, None)])
def test_cpu_quota(tmp_path, files, quota):
    assert probe(tree(tmp_path, two_nodes() | files)).cpu_quota == quota


def test_cpus_that_are_off_are_told(tmp_path):
    found = probe(tree(tmp_path, two_nodes() | {"sys/devices/system/cpu/online": "0-3,6",
                                                "sys/devices/system/cpu/present": "0-7"}))
    assert (found.offline, found.barred) == ((4, 5, 7), ())
    assert [cpu.siblings for cpu in found.cpus] == [(0,), (1,), (2, 6), (3,), (2, 6)]


def test_caches(tmp_path):
    folder = "sys/devices/system/cpu/cpu{}/cache/index{}/{}"
    files = two_nodes()
    for cpu in range(8):
        core, socket = f"{cpu % 4},{cpu % 4 + 4}", "0-1,4-5" if cpu % 4 < 2 else "2-3,6-7"
        for index, (level, kind, size, shared) in enumerate([
                (1, "Data", "48K", core), (1, "Instruction", "32K", core), (3, "Unified", "105M", socket),
                (2, "Unified", "2048K", core), (3, "Unified", "107520K", socket)]):
            files |= {folder.format(cpu, index, name): str(value) for name, value in (
                ("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared))}
    found = probe(tree(tmp_path, files), affinity=range(7)).caches
    assert [(cache.level, cache.size_bytes, cache.cpus) for cache in found] == [
        *((1, 48 << 10, (i, i + 4)) for i in range(3)), (1, 48 << 10, (3,)),
        *((2, 2 << 20, (i, i + 4)) for i in range(3)), (2, 2 << 20, (3,)),
        (3, 105 << 20, (0, 1, 4, 5)), (3, 105 << 20, (2, 3, 6))]


BASE = "sys/devices/system/cpu/cpufreq/policy{}/base_frequency"


@pytest.mark.parametrize("files, slow", [
    ({"sys/devices/cpu_core/cpus": "0-1,4-5", "sys/devices/cpu_atom/cpus": "2-3,6-7"}, [2, 3, 6, 7]),
    ({"sys/devices/cpu_atom/cpus": "2", "sys/devices/cpu_lowpower/cpus": "3"}, [2, 3]),
    ({f"sys/devices/system/cpu/cpu{i}/cpu_capacity": "1024" if i % 4 < 2 else "446" for i in range(8)}, [2, 3, 6, 7]),
    ({BASE.format(i): "1900000" if i % 4 < 2 else "1400000" for i in range(8)}, []),       # equal cores
    ({BASE.format(i): "1900000" if i < 3 or i == 4 else "1400000" for i in range(8)}
     | {f"sys/devices/system/cpu/cpu{i}/topology/core_cpus_list": str(i) for i in (3, 5, 6, 7)}, [3, 5, 6, 7]),
    ({"sys/devices/cpu_atom/cpus": "0-7"}, []),
    ({}, [])])
def test_hybrid_processors(tmp_path, files, slow):
    found = probe(tree(tmp_path, two_nodes() | files))
    assert [cpu.id for cpu in found.cpus if cpu.kind == "E"] == slow
    assert {cpu.kind for cpu in found.cpus if cpu.id not in slow} == {"P" if slow else ""}
    assert found.hybrid == bool(slow)


def test_huge_pages(tmp_path):
    pages = "{}/hugepages-{}kB/{}_hugepages"
    machine, node = "sys/kernel/mm/hugepages", "sys/devices/system/node/node1/hugepages"
    found = probe(tree(tmp_path, two_nodes() | {
        pages.format(machine, 2048, "nr"): "512", pages.format(machine, 2048, "free"): "500",
        pages.format(machine, 1048576, "nr"): "0", pages.format(node, 2048, "nr"): "512",
        pages.format(node, 2048, "free"): "500",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never"}))
    assert found.huge_pages == found.nodes[1].huge_pages == (HugePages(2 << 20, 512, 500),)
    assert (found.nodes[0].huge_pages, found.transparent_huge_pages) == ((), "madvise")


@pytest.mark.parametrize("flags, amx, avx512, bf16", [
    ("fpu avx2", False, False, False), ("avx512f avx512_bf16", False, True, True),
    ("avx512f amx_tile amx_int8", False, True, False), ("avx512f amx_tile amx_bf16", True, True, True)])
def test_what_the_cpus_compute(tmp_path, flags, amx, avx512, bf16):
    found = probe(tree(tmp_path, {"proc/cpuinfo": f"processor : 0\nflags : {flags}\n"}))
    assert (found.amx, found.avx512, found.bf16) == (amx, avx512, bf16)
    assert not replace(found, amx_allowed=False).amx


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
