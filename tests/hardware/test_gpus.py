"""GPUs by the real nvidia-ml-py over a driver library of our own (nvml_stub.c)."""

import shutil

import pytest

from tests.hardware import nvml
from tests.hardware.trees import tree, two_nodes

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="gcc builds the NVML stub")

NEAR = {0: "33", 1: "cc"}       # CPUs 0-1,4-5 and 2-3,6-7: the nodes of trees.two_nodes


@pytest.fixture
def read(library, tmp_path):
    """read(stub, {bus: {file: content}}, ...): what gpus.read answers in a process with that library."""
    def run(stub, devices=None, **environ):
        tree(tmp_path, two_nodes() | {f"sys/bus/pci/devices/{bus}/{name}": value
                                      for bus, files in (devices or {}).items() for name, value in files.items()})
        return nvml.read(library, tmp_path, stub, **environ)
    return run


def places(found):
    return [(gpu["index"], gpu["bus_id"], gpu["numa_node"], gpu["cpus"]) for gpu in found]


def test_a_driver_without_gpus(read):
    assert read("") == ([], [])


def test_one_gpu(read):
    found, warnings = read(f"00000000:41:00.0 {NEAR[0]}", {"0000:41:00.0": {"numa_node": "0"}})
    assert found == [{"index": 0, "name": "Stub H200", "memory_bytes": 141 << 30, "bus_id": "0000:41:00.0",
                      "numa_node": 0, "cpus": [0, 1, 4, 5], "links": []}]
    assert warnings == []


def test_two_gpus_of_which_the_firmware_places_none(read):
    found, warnings = read(f"00000000:41:00.0 {NEAR[1]};00000000:C1:00.0 -", {
        "0000:41:00.0": {"numa_node": "-1"}, "0000:c1:00.0": {"numa_node": "-1", "local_cpulist": "0-1"}})
    assert places(found) == [(0, "0000:41:00.0", 1, [2, 3, 6, 7]), (1, "0000:c1:00.0", 0, [0, 1])]
    assert warnings == []


def test_a_gpu_near_all_cpus_is_on_no_node(read):
    assert places(read("00000000:41:00.0 ff")[0]) == [(0, "0000:41:00.0", None, list(range(8)))]


def test_eight_gpus_on_two_nodes(read):
    buses = [f"{domain:04x}:{bus:02x}:00.0" for domain in (0, 1) for bus in (0x1a, 0x3d, 0x41, 0xc1)]
    found, warnings = read(";".join(f"0000{bus} {NEAR[i // 4]}" for i, bus in enumerate(buses)),
                           {bus: {"numa_node": str(i // 4)} for i, bus in enumerate(buses)})
    assert places(found) == [(i, bus, i // 4, [0, 1, 4, 5] if i < 4 else [2, 3, 6, 7]) for i, bus in enumerate(buses)]
    assert found[1]["links"] == [
        *({"gpu": i, "kind": "NVLink", "peer": True} for i in (0, 2, 3)),
        *({"gpu": i, "kind": "sockets", "peer": False} for i in (4, 5, 6, 7))]
    assert warnings == []


def test_no_driver_library(read, tmp_path):
    assert read("00000000:41:00.0 f", LD_LIBRARY_PATH=str(tmp_path)) == ([], [])


def test_driver_not_loaded(read):
    assert read("00000000:41:00.0 f", NVML_STUB_INIT="9") == ([], ["GPUs cannot be used: Driver Not Loaded"])


@pytest.mark.parametrize("query", ["handle", "pci", "name", "memory", "mig", "affinity"])
def test_a_gpu_lost_during_a_query(read, query):
    found, warnings = read("00000000:41:00.0 f;00000000:81:00.0 f;00000000:C1:00.0 f", NVML_STUB_LOST=f"1 {query}")
    assert [gpu["index"] for gpu in found] == [0, 2]
    assert [[link["gpu"] for link in gpu["links"]] for gpu in found] == [[2], [0]]
    assert warnings == ["GPU 1 cannot be used: GPU is lost"]


def test_a_gpu_lost_while_its_links_are_read(read):
    found, warnings = read("00000000:41:00.0 f;00000000:81:00.0 f;00000000:C1:00.0 f", NVML_STUB_LOST="1 links")
    assert [gpu["index"] for gpu in found] == [0, 2]
    assert [[link["gpu"] for link in gpu["links"]] for gpu in found] == [[2], [0]]
    assert warnings == ["GPU 1 cannot be used: GPU is lost"]


def test_a_partitioned_gpu_is_refused_with_the_way_out(read):
    found, warnings = read("00000000:41:00.0 f;00000000:81:00.0 f", NVML_STUB_MIG="0")
    assert [gpu["index"] for gpu in found] == [1]
    assert warnings == ["GPU 0 cannot be used: MIG is on, and a worker takes a whole GPU; "
                        "nvidia-smi -i 0 -mig 0 switches it off"]


@pytest.mark.parametrize("visible, indexes", [
    ("", []), ("-1", []), ("1", [1]), ("2, 0", [0, 2]), ("GPU-0001", [1]), ("GPU-0002,1", [1, 2])])
def test_gpus_that_are_kept_for_others(read, visible, indexes):
    found, _ = read("00000000:41:00.0 f;00000000:81:00.0 f;00000000:C1:00.0 f", CUDA_VISIBLE_DEVICES=visible)
    assert [gpu["index"] for gpu in found] == indexes


@pytest.mark.parametrize("stub, environ, found", [
    ("00000000:41:00.0 f", {}, ""), ("00000000:41:00.0 f", {"NVML_STUB_LOST": "0 memory"}, "GPU is lost"),
    ("00000000:41:00.0 f", {"NVML_STUB_LOST": "0 handle"}, "GPU is lost"), ("", {}, "Invalid Argument"),
    ("", {"NVML_STUB_INIT": "9"}, "Driver Not Loaded"), ("", {"LD_LIBRARY_PATH": "/nowhere"}, "")])
def test_what_became_of_a_gpu(library, stub, environ, found):
    assert nvml.lost(library, stub, **environ) == found
