from dataclasses import replace

import pytest

from epdd import placement
from epdd.arena import HUGE
from epdd.errors import PlacementError
from epdd.hardware.topology import Cpu, HugePages, NumaNode, Topology, ranges
from epdd.settings.config import Config
from tests.placement.machines import FAMILY, GIB, machine

ARENA = 4 * GIB


def config(**settings):
    """config(encoder_workers=2) sets encoder.workers."""
    made = Config()
    for name, value in settings.items():
        section, key = name.split("_", 1)
        made = made.with_values(section, {key: value}, "test")
    return made


def placed(topology, **settings):
    specs = placement.plan(topology, config(**settings), FAMILY, ARENA)
    return [(spec.name, spec.device, spec.numa_node, ranges(spec.cpus), spec.threads) for spec in specs]


def test_one_node_of_two_cores_gives_one_core_each():
    assert placed(machine([2], threads=1)) == [("encoder/0", "cpu", 0, "1", 1), ("pd/0", "cpu", 0, "0", 1)]


def test_both_roles_share_an_only_core():
    assert placed(machine([1])) == [("encoder/0", "cpu", 0, "0", 1), ("pd/0", "cpu", 0, "0", 1)]


def test_every_node_encodes_and_one_also_prefills_and_decodes():
    assert placed(machine([16, 16])) == [
        ("encoder/0", "cpu", 0, "1-15", 15),        # CPU 0 is left to the daemon
        ("encoder/1", "cpu", 1, "24-31", 8),
        ("pd/0", "cpu", 1, "16-23", 8)]


def test_five_gpus_on_four_nodes():
    assert placed(machine([16, 16, 16, 16], gpu_nodes=[0, 0, 1, 2, 3])) == [
        ("encoder/0", "cuda:0", 0, "1-2", 2),       # one core launches kernels, one decodes the next image
        ("encoder/1", "cpu", 0, "4-15", 12),
        ("encoder/2", "cpu", 1, "17-31", 15),
        ("encoder/3", "cpu", 2, "33-47", 15),
        ("encoder/4", "cpu", 3, "49-63", 15),
        ("pd/0", "cuda:1", 0, "3", 1),
        ("pd/1", "cuda:2", 1, "16", 1),
        ("pd/2", "cuda:3", 2, "32", 1),
        ("pd/3", "cuda:4", 3, "48", 1)]


def test_eight_gpus_on_two_nodes():
    assert placed(machine([48, 48], gpu_nodes=[0] * 4 + [1] * 4)) == [
        ("encoder/0", "cuda:0", 0, "1-2", 2),
        ("encoder/1", "cpu", 0, "6-47", 42),
        ("encoder/2", "cpu", 1, "52-95", 44),
        *((f"pd/{i}", f"cuda:{i + 1}", 0, str(3 + i), 1) for i in range(3)),
        *((f"pd/{i}", f"cuda:{i + 1}", 1, str(45 + i), 1) for i in range(3, 7))]


def test_four_nodes_per_socket():
    """An EPYC with NPS4: eight small nodes, and a prefill-decode worker that takes half of one."""
    assert placed(machine([8] * 8)) == [
        ("encoder/0", "cpu", 0, "1-7", 7),
        *((f"encoder/{node}", "cpu", node, f"{8 * node}-{8 * node + 7}", 8) for node in range(1, 7)),
        ("encoder/7", "cpu", 7, "60-63", 4),
        ("pd/0", "cpu", 7, "56-59", 4)]


def test_nodes_without_memory_or_without_cpus_get_no_worker():
    """Node 1 has CPUs alone, node 2 memory alone, node 3 neither."""
    topology = machine([4, 4, 4])
    nodes = [topology.nodes[0], replace(topology.nodes[1], memory_bytes=0), topology.nodes[2],
             NumaNode(3, (), 64 * GIB), NumaNode(4, (), 0)]
    plan = placement.decide(replace(topology, nodes=tuple(nodes)), config(), FAMILY, ARENA)
    assert [(spec.name, spec.numa_node, ranges(spec.cpus)) for spec in plan.specs] == [
        ("encoder/0", 0, "0-3"), ("encoder/1", 2, "10-11"), ("pd/0", 2, "8-9")]
    assert [reason for reason in plan.why if "no worker" in reason] == [
        "NUMA node 1 has no worker: no memory", "NUMA node 3 has no worker: no CPUs that this process may use",
        "NUMA node 4 has no worker: no CPUs that this process may use and no memory"]


def test_a_container_stays_within_its_cpuset():
    """CPUs 2-5 of four nodes of four, and the memory of node 1 alone."""
    topology = machine([4] * 4, threads=1)
    cpus = tuple(cpu for cpu in topology.cpus if 2 <= cpu.id <= 5)
    nodes = [replace(node, cpus=tuple(cpu for cpu in node.cpus if 2 <= cpu <= 5), memory_allowed=node.id == 1)
             for node in topology.nodes]
    inside = replace(topology, cpus=cpus, nodes=tuple(nodes), barred=(0, 1, *range(6, 16)))
    assert placed(inside) == [("encoder/0", "cpu", 1, "5", 1), ("pd/0", "cpu", 1, "4", 1)]
    why = placement.decide(inside, config(), FAMILY, ARENA).why
    assert "CPUs 0-1,6-15 are on but not ours: a cpuset or the affinity leaves 2-5" in why
    assert "NUMA node 0 has no worker: a cpuset keeps this process from its memory" in why


def test_a_hybrid_laptop_does_not_mix_the_kinds_in_one_worker():
    """Six performance cores with two threads each, eight efficiency cores."""
    kinds = [Cpu(i, i - i % 2, 0, 0, (i - i % 2, i - i % 2 + 1), "P") for i in range(12)]
    kinds += [Cpu(i, i, 0, 0, (i,), "E") for i in range(12, 20)]
    laptop = Topology(tuple(kinds), (NumaNode(0, tuple(range(20)), 32 * GIB),), memory_bytes=32 * GIB)
    assert placed(laptop) == [("encoder/0", "cpu", 0, "0,2,4,6,8,10", 6), ("pd/0", "cpu", 0, "13-19", 7)]
    with_gpu = replace(laptop, gpus=machine([1], gpu_nodes=[0]).gpus)
    assert placed(with_gpu) == [("encoder/0", "cpu", 0, "2,4,6,8,10", 5), ("pd/0", "cuda:0", 0, "0", 1)]


def test_a_cpu_quota_limits_the_cores():
    """Sixteen cores on two nodes, but the time of three and a half."""
    plan = placement.decide(replace(machine([8, 8]), cpu_quota=3.5), config(), FAMILY, ARENA)
    assert [(spec.name, spec.numa_node, ranges(spec.cpus)) for spec in plan.specs] == [
        ("encoder/0", 0, "2"), ("pd/0", 0, "0-1")]
    assert "3 cores can be used: the cgroup's quota grants the time of 3.5 CPUs" in plan.why
    assert "NUMA node 1 has no worker: the cgroup's CPU quota is used up" in plan.why


def test_a_gpu_on_a_node_where_no_worker_can_sit_is_served_by_the_nearest():
    topology = machine([4, 4, 4], gpu_nodes=[8])
    far = replace(topology, nodes=(*topology.nodes, NumaNode(8, (), GIB, ((0, 40), (1, 20), (2, 40), (8, 10)))))
    plan = placement.decide(far, config(), FAMILY, ARENA)
    assert (plan.specs[-1].numa_node, ranges(plan.specs[-1].cpus)) == (1, "4")
    assert plan.why[-1] == "pd/0 (cuda:0): 1 core of NUMA node 1, the nearest to the GPU's"


def test_an_only_gpu_prefills_and_decodes():
    assert placed(machine([8, 8], gpu_nodes=[1])) == [
        ("encoder/0", "cpu", 0, "1-7", 7), ("encoder/1", "cpu", 1, "9-15", 7), ("pd/0", "cuda:0", 1, "8", 1)]


def test_a_gpu_of_unknown_place_gets_its_core_where_most_are_free():
    assert placed(machine([4, 8], gpu_nodes=[None]))[-1] == ("pd/0", "cuda:0", 1, "4", 1)


def test_a_gpu_on_a_two_core_machine_leaves_one_core_to_encode():
    assert placed(machine([2], gpu_nodes=[0])) == [("encoder/0", "cpu", 0, "1", 1), ("pd/0", "cuda:0", 0, "0", 1)]


def test_operator_chooses_how_many_gpus_encode():
    assert [worker[:2] for worker in placed(machine([16], gpu_nodes=[0] * 5), pd_workers=3, encoder_workers=2)] == [
        ("encoder/0", "cuda:0"), ("encoder/1", "cuda:1"), ("pd/0", "cuda:2"), ("pd/1", "cuda:3"), ("pd/2", "cuda:4")]


def test_more_encoders_than_nodes_split_the_cores():
    assert placed(machine([8, 8]), encoder_workers=4) == [
        ("encoder/0", "cpu", 0, "1-3", 3), ("encoder/1", "cpu", 0, "4-7", 4),
        ("encoder/2", "cpu", 1, "12-13", 2), ("encoder/3", "cpu", 1, "14-15", 2), ("pd/0", "cpu", 1, "8-11", 4)]


def test_more_workers_than_cores_share_them_with_one_thread_each():
    assert placed(machine([2], threads=1), encoder_workers=3, pd_workers=2) == [
        ("encoder/0", "cpu", 0, "0", 1), ("encoder/1", "cpu", 0, "1", 1), ("encoder/2", "cpu", 0, "0", 1),
        ("pd/0", "cpu", 0, "0", 1), ("pd/1", "cpu", 0, "1", 1)]


def test_threads_of_one_role_leave_the_rest_to_the_other():
    assert placed(machine([7]), encoder_threads=5) == [("encoder/0", "cpu", 0, "2-6", 5), ("pd/0", "cpu", 0, "0-1", 2)]
    assert placed(machine([7]), pd_threads=1) == [("encoder/0", "cpu", 0, "1-6", 6), ("pd/0", "cpu", 0, "0", 1)]


def test_without_a_node_that_has_memory_all_cpus_are_one_unbound_domain():
    topology = machine([2, 2], node_memory=0)
    assert placed(replace(topology, memory_bytes=16 * GIB)) == [
        ("encoder/0", "cpu", None, "2-3", 2), ("pd/0", "cpu", None, "0-1", 2)]


@pytest.mark.parametrize("topology, asked, words", [
    (machine([4]), {"encoder_threads": 4}, "4 physical cores are free on NUMA node 0; asked for: 1 x pd"),
    (machine([4]), {"pd_threads": 3, "encoder_threads": 2}, "1 x pd with 3 threads and 1 x encoder with 2 threads"),
    (machine([4], gpu_nodes=[0]), {"pd_workers": 2},
     "encoder.workers is auto, pd.workers is 2: that takes 2 GPUs; there is 1 GPU"),
    (machine([4]), {"pd_kv_bytes": 999 * GIB}, "pd.kv_bytes is 999 GiB; the machine has 128 GiB"),
    (Topology((), ()), {}, "no CPU"),
])
def test_what_does_not_fit_is_refused_with_numbers(topology, asked, words):
    with pytest.raises(PlacementError, match=words):
        placement.plan(topology, config(**asked), FAMILY, ARENA)


def test_sizes():
    topology = machine([4], node_memory=32 * GIB)
    encoder, pd = placement.plan(topology, config(), FAMILY, ARENA)
    assert (encoder.arena_bytes, encoder.arena_slice) == (ARENA, (0, ARENA))
    assert (pd.arena_bytes, pd.arena_slice) == (ARENA, (0, 0))
    assert (encoder.kv_bytes, pd.kv_bytes) == (0, 4 * GIB)
    shared = placement.plan(topology, config(pd_workers=2), FAMILY, ARENA)[-2:]
    assert [spec.kv_bytes for spec in shared] == [2 * GIB, 2 * GIB]
    crowded = machine([2] * 8, node_memory=8 * GIB)
    assert placement.plan(crowded, config(), FAMILY, ARENA)[-1].kv_bytes == 4 * GIB     # half of its NUMA node
    assert placement.plan(topology, config(pd_kv_tokens=4096), FAMILY, ARENA)[-1].kv_tokens == 4096


def test_settings_reach_the_workers():
    spec = placement.plan(machine([2]), config(model_dtype="bfloat16", model_max_model_len=2048,
                                               pd_max_batched_tokens=64, pd_max_sequences=3, log_level="debug"),
                          FAMILY, ARENA)[-1]
    assert (spec.model, spec.dtype, spec.max_model_len) == (FAMILY.folder, "bfloat16", 2048)
    assert (spec.max_batched_tokens, spec.max_sequences, spec.log_level) == (64, 3, "debug")


def test_arena_size():
    image = FAMILY.embedding_bytes(FAMILY.rows_max)
    assert image == 40 << 20
    assert placement.arena_bytes(config(), machine([2]), FAMILY) == 4 * GIB
    assert placement.arena_bytes(config(), machine([2], node_memory=GIB), FAMILY) == GIB // 4
    assert placement.arena_bytes(config(), machine([2], node_memory=128 << 20), FAMILY) == 64 << 20
    assert placement.arena_bytes(config(), machine([2], node_memory=None), FAMILY) == 4 * GIB
    assert placement.arena_bytes(config(arena_bytes=HUGE + 1), machine([2]), FAMILY) == 2 * HUGE
    large = replace(FAMILY, max_pixels=16 << 20)
    assert placement.arena_bytes(config(), machine([2], node_memory=GIB), large) == 640 << 20
    with pytest.raises(PlacementError, match="the largest image's embedding is 640 MiB; the machine has 512 MiB"):
        placement.arena_bytes(config(), machine([2], node_memory=512 << 20), large)
    with pytest.raises(PlacementError, match="arena.bytes is 999 GiB"):
        placement.arena_bytes(config(arena_bytes=999 * GIB), machine([2]), FAMILY)


@pytest.mark.parametrize("settings, free, wanted", [
    ({}, (4 * GIB, 2 * GIB, 2 * GIB), True), ({"arena_huge_pages": False}, (4 * GIB, 2 * GIB, 2 * GIB), False),
    ({}, (4 * GIB, 1 * GIB, 3 * GIB), False),       # each slice lies on its encoder's NUMA node
    ({}, (3 * GIB, 2 * GIB, 2 * GIB), False)])
def test_reserved_huge_pages_must_suffice_on_each_node(settings, free, wanted):
    made = machine([4, 4])
    whole, *nodes = ((HugePages(1 << 30, 8, 8), HugePages(HUGE, 4096, size // HUGE)) for size in free)
    topology = replace(made, huge_pages=whole, nodes=tuple(
        replace(node, huge_pages=pages) for node, pages in zip(made.nodes, nodes)))
    specs = placement.plan(topology, config(**settings), FAMILY, ARENA)
    assert placement.fits_reserved_pages(specs, topology) is wanted


def test_explain():
    topology = machine([16, 16], gpu_nodes=[1])
    text = placement.explain(placement.plan(topology, config(), FAMILY, ARENA), topology)
    assert text == """\
Xeon: 2 sockets, 2 NUMA nodes, 32 cores (64 CPUs), 256 GiB memory, 1 x H200, AMX

WORKER     DEVICE  NUMA  CPUS   THREADS  MEMORY
encoder/0  cpu     0     1-15   15       arena 2 GiB
encoder/1  cpu     1     17-31  15       arena 2 GiB
pd/0       cuda:0  1     16     1        KV 131.2 GiB

left to the daemon and the system: CPUs 0,32-63"""
