"""Recorded machines, if they are available: the probe must agree with lscpu and hwloc."""

import functools
import json
import shutil
from dataclasses import replace

import msgspec
import pytest

from epdd import placement
from epdd.hardware.probe import probe
from epdd.hardware.topology import EFFICIENCY, Gpu, ranges
from epdd.settings.config import Config
from tests.hardware import nvml, recorded
from tests.hardware.trees import tree
from tests.placement.machines import FAMILY, GIB

if not (recorded.ARCHIVES / "expected.json").is_file():
    pytest.skip("no recorded topologies at ../shared/topology", allow_module_level=True)

EXPECTED = json.loads((recorded.ARCHIVES / "expected.json").read_text())
EVERY_CPU = range(4096)
XMLS = sorted((recorded.ARCHIVES / "gpu").glob("*.xml"))

# Each machine's peculiarity, beyond the counts of expected.json.
ODDITIES = {
    "ghw-linux-amd64-offlineCPUs": lambda found: ("offline", ranges(found.offline), "2-3"),
    "hwloc-offline-cpu0-node0/offline-cpu0-node0": lambda found: (
        "CPUs without a node", sum(cpu.node is None for cpu in found.cpus), 9),
    "hwloc-16amd64-8n2c-cpusets/16amd64-8n2c-cpusets": lambda found: ("offline", ranges(found.offline), "4"),
    "hwloc-32amd64-4s2n4c-cgroup2/32amd64-4s2n4c-cgroup": lambda found: ("usable CPUs", ranges(
        cpu.id for cpu in found.cpus), "0-5"),
    "hwloc-8em64t-2s2ca2c-buggynuma/8em64t-2s2ca2c-buggynuma": lambda found: (
        "warnings", found.warnings, ("CPUs 0-7 are listed by several NUMA nodes: taken as in none",)),
    "hwloc-20em64t-hybrid-1p6c2t+2ca4co1t/20em64t-hybrid-1p6c2t+2ca4co1t": lambda found: (
        "efficiency cores", ranges(cpu.id for cpu in found.cpus if cpu.kind == EFFICIENCY), "12-19"),
}

# hwloc took a cpuset's configured CPUs, 0-175; the recorded kernel had made it 0-87 of them, of which 0-15 are on.
EFFECTIVE = {"hwloc-nvidiagpunumanodes/nvidiagpunumanodes": {"Core": 4, "PU": 16}}


@functools.cache
def archive(name):
    return recorded.archive(name, [key for key in EXPECTED if key.split("/")[0] == name])


@functools.cache
def probed(key):
    """The whole machine, and its part within the recorded cpuset."""
    root, files = archive(key.split("/")[0])[key]
    with pytest.MonkeyPatch.context() as patch:
        recorded.use(patch, files)
        own = probe(root)
        return (probe(root, affinity=EVERY_CPU) if own.barred else own), own


@pytest.mark.parametrize("key", EXPECTED)
def test_recorded_machine(key, judge):
    want = EXPECTED[key]
    whole, own = probed(key)
    memory = {str(node.id): node.memory_bytes and node.memory_bytes >> 20 for node in whole.nodes}
    allowed = EFFECTIVE.get(key) or want["hwloc_allowed"]       # what the recorded cpuset leaves
    checks = {
        "sockets": (whole.sockets, want["sockets"]),
        "nodes": ([node.id for node in whole.nodes], want["nodes"]),
        "nodes with CPUs": ([node.id for node in whole.nodes if node.cpus], want["cpu_nodes"]),
        "CPUs": (len(whole.cpus), want["online_cpus"]),
        "CPUs per node": ({str(node.id): ranges(node.cpus) for node in whole.nodes}, want["node_cpus_online"]),
        "memory per node": (memory, want["node_mem_mb"]),
        "AMX": (whole.amx, want["amx"]),
        "allowed cores": (own.cores, allowed["Core"]),
        "allowed CPUs": (len(own.cpus), allowed["PU"]),
        "hybrid": (own.hybrid, "hybrid" in key),
    }
    if key in ODDITIES:
        what, found, expected = ODDITIES[key](own)
        checks[what] = (found, expected)
    judge(key.rpartition("/")[2], f"{whole.sockets} sockets, {len(whole.nodes)} nodes, {len(whole.cpus)} CPUs", checks)


@pytest.mark.parametrize("key", EXPECTED)
def test_plan_for_a_recorded_machine(key):
    found = probed(key)[1]
    worker_nodes = {node.id for node in found.nodes if node.has_memory
                    and any(cpu.node == node.id for cpu in found.cpus)}
    specs = placement.plan(found, Config(), FAMILY, GIB)
    # Two recorded machines have no NUMA node with CPUs of its own and memory: there nothing can be bound.
    assert {spec.numa_node for spec in specs} == (worker_nodes or {None})
    assert {cpu for spec in specs for cpu in spec.cpus} <= {cpu.id for cpu in found.cpus}


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc builds the NVML stub")
@pytest.mark.parametrize("path", XMLS, ids=lambda path: path.stem)
def test_recorded_gpus(path, tmp_path, library, judge):
    """The node comes from the firmware, or else from the CPUs that the driver says are near."""
    want = recorded.gpu_map(path)
    base = "sys/devices/system"
    known = {node: want.cpus(node) for node, mask in want.masks.items() if mask}
    tree(tmp_path, {f"{base}/cpu/online": ranges(set().union(*known.values())) or "0"}
         | {f"{base}/node/node{node}/cpulist": ranges(cpus) for node, cpus in known.items()})
    buses = sorted(want.node_of)
    checks = {}
    for source in ("firmware", "driver") if known else ("firmware",):
        tree(tmp_path, {f"sys/bus/pci/devices/{bus}/numa_node": str(node) if source == "firmware" else "-1"
                        for bus, node in want.node_of.items()})
        masks = {node: mask if source == "driver" else "-" for node, mask in want.masks.items()}
        found, warnings = nvml.read(library, tmp_path, ";".join(
            f"0000{bus} {masks[want.node_of[bus]]}" for bus in buses))
        checks[f"node by {source}"] = ({gpu["bus_id"]: gpu["numa_node"] for gpu in found}, want.node_of)
        checks[f"warnings by {source}"] = (warnings, [])
        if source == "driver":
            placed = replace(probe(tmp_path), gpus=tuple(msgspec.convert(gpu, Gpu) for gpu in found))
            workers = placement.plan(placed, Config(), FAMILY, GIB)
            checks["nodes of the workers"] = (
                {spec.device: spec.numa_node for spec in workers if spec.device != "cpu"},
                {f"cuda:{i}": want.node_of[bus] for i, bus in enumerate(buses)})
            checks["near CPUs"] = ([set(gpu["cpus"]) for gpu in found], [known[want.node_of[bus]] for bus in buses])
    judge(path.stem, f"{len(buses)} GPUs on nodes {ranges(want.node_of.values())}", checks)
