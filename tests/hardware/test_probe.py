import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from epdd.hardware import sysfs
from epdd.hardware.probe import probe
from epdd.hardware.topology import Gpu, ranges


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


def two_nodes() -> dict[str, str]:
    """Two sockets of two cores with two threads: 0-3 are the cores, 4-7 their siblings."""
    files = {"sys/devices/system/cpu/online": "0-7", "sys/devices/system/node/online": "0-1",
             "proc/cpuinfo": "processor : 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 amx_tile amx_bf16\n",
             "proc/meminfo": "MemTotal:       8388608 kB"}
    for cpu in range(8):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{folder}/physical_package_id"] = str(cpu % 4 // 2)
        files[f"{folder}/core_cpus_list"] = f"{cpu % 4},{cpu % 4 + 4}"
    for node in range(2):
        folder = f"sys/devices/system/node/node{node}"
        files[f"{folder}/cpulist"] = f"{2 * node}-{2 * node + 1},{2 * node + 4}-{2 * node + 5}"
        files[f"{folder}/meminfo"] = f"Node {node} MemTotal:  4194304 kB"
        files[f"{folder}/distance"] = "10 21" if node == 0 else "21 10"
    return files


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
    assert [node.memory_bytes for node in found.nodes] == [0, 4 << 30]


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


NVML = """
    class NVMLError(Exception): pass
    class NVMLError_LibraryNotFound(NVMLError): pass
    class Obj:
        def __init__(self, **kw): self.__dict__.update(kw)
    nodes = {{"41": 0x0f, "81": 0xf0, "c1": None}}
    def nvmlInit(): {init}
    def nvmlShutdown(): pass
    def nvmlDeviceGetCount(): return 4
    def nvmlDeviceGetHandleByIndex(i):
        if i == 3: raise NVMLError("GPU is lost")
        return list(nodes)[i]
    def nvmlDeviceGetPciInfo(h): return Obj(busId=f"00000000:{{h.upper()}}:00.0".encode())
    def nvmlDeviceGetUUID(h): return f"GPU-{{h}}-5"
    def nvmlDeviceGetName(h): return "H200"
    def nvmlDeviceGetMemoryInfo(h): return Obj(total=150 << 30)
    def nvmlDeviceGetCpuAffinity(h, words):
        if nodes[h] is None: raise NVMLError("Not Supported")
        return [nodes[h]] + [0] * (words - 1)
"""


def gpus_with(tmp_path, init="pass", **environ):
    """gpus.read in a child that finds a pynvml of ours, over the two-node tree: GPU 0 without a sysfs entry."""
    tree(tmp_path, two_nodes() | {"sys/bus/pci/devices/0000:81:00.0/numa_node": "1",
                                  "sys/bus/pci/devices/0000:c1:00.0/numa_node": "-1",
                                  "sys/bus/pci/devices/0000:c1:00.0/local_cpulist": "2-3",
                                  "sys/devices/system/node/node0/cpulist": "0-3",
                                  "sys/devices/system/node/node1/cpulist": "4-7",
                                  "pynvml.py": textwrap.dedent(NVML).format(init=init)})
    code = ("import sys; from pathlib import Path; from epdd.hardware import gpus, nodes; root = Path(sys.argv[1])\n"
            "print(gpus.read(root, range(8), nodes.read(root, range(8))))")
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True,
                          env=inherited | {"PYTHONPATH": str(tmp_path)} | environ).stdout.strip()


def test_gpus(tmp_path):
    want = (tuple(Gpu(i, "H200", 150 << 30, f"0000:{bus}:00.0", node, cpus) for i, (bus, node, cpus) in enumerate([
        ("41", 0, (0, 1, 2, 3)), ("81", 1, (4, 5, 6, 7)), ("c1", 0, (2, 3))])), ["GPU 3 cannot be used: GPU is lost"])
    assert gpus_with(tmp_path) == repr(want)


@pytest.mark.parametrize("init, answer", [
    ("raise NVMLError_LibraryNotFound()", "((), [])"),
    ("raise NVMLError('Driver Not Loaded')", "((), ['GPUs cannot be used: Driver Not Loaded'])")])
def test_no_driver(tmp_path, init, answer):
    assert gpus_with(tmp_path, init) == answer


@pytest.mark.parametrize("visible, indexes", [
    ("", []), ("-1", []), ("1", [1]), ("2, 0", [0, 2]), ("GPU-81", [1]), ("GPU-c1-5,1", [1, 2])])
def test_gpus_that_are_kept_for_others(tmp_path, visible, indexes):
    found = gpus_with(tmp_path, CUDA_VISIBLE_DEVICES=visible)
    assert [int(index) for index in re.findall(r"Gpu\(index=(\d)", found)] == indexes
