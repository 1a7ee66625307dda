from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epdd import placement
from epdd.arena import PAGE
from epdd.config import Config
from epdd.errors import PlacementError
from epdd.hardware.topology import Topology, ranges
from tests.machines import FAMILY, GIB, machine

ARENA = 4 * GIB


def config(**settings):
    """config(encoder_workers=2) sets encoder.workers."""
    made = Config()
    for name, value in settings.items():
        section, key = name.split("_", 1)
        made = made.with_values(section, {key: value}, "test")
    return made


def seats(topology, **settings):
    specs = placement.plan(topology, config(**settings), FAMILY, ARENA)
    return [(spec.name, spec.device, spec.numa_node, ranges(spec.cpus), spec.threads) for spec in specs]


def test_one_node_of_two_cores_gives_one_core_each():
    assert seats(machine([2], threads=1)) == [("encoder/0", "cpu", 0, "1", 1), ("pd/0", "cpu", 0, "0", 1)]


def test_both_roles_share_an_only_core():
    assert seats(machine([1])) == [("encoder/0", "cpu", 0, "0", 1), ("pd/0", "cpu", 0, "0", 1)]


def test_every_node_encodes_and_one_also_prefills_and_decodes():
    assert seats(machine([16, 16])) == [
        ("encoder/0", "cpu", 0, "1-15", 15),        # CPU 0 is left to the daemon
        ("encoder/1", "cpu", 1, "24-31", 8),
        ("pd/0", "cpu", 1, "16-23", 8)]


def test_five_gpus_on_four_nodes():
    assert seats(machine([16, 16, 16, 16], gpu_nodes=[0, 0, 1, 2, 3])) == [
        ("encoder/0", "cuda:0", 0, "1-2", 2),       # one core launches kernels, one decodes the next image
        ("encoder/1", "cpu", 0, "4-15", 12),
        ("encoder/2", "cpu", 1, "17-31", 15),
        ("encoder/3", "cpu", 2, "33-47", 15),
        ("encoder/4", "cpu", 3, "49-63", 15),
        ("pd/0", "cuda:1", 0, "3", 1),
        ("pd/1", "cuda:2", 1, "16", 1),
        ("pd/2", "cuda:3", 2, "32", 1),
        ("pd/3", "cuda:4", 3, "48", 1)]


def test_an_only_gpu_prefills_and_decodes():
    assert seats(machine([8, 8], gpu_nodes=[1])) == [
        ("encoder/0", "cpu", 0, "1-7", 7), ("encoder/1", "cpu", 1, "9-15", 7), ("pd/0", "cuda:0", 1, "8", 1)]


def test_a_gpu_of_unknown_place_gets_its_core_where_most_are_free():
    assert seats(machine([4, 8], gpu_nodes=[None]))[-1] == ("pd/0", "cuda:0", 1, "4", 1)


def test_a_gpu_on_a_two_core_machine_leaves_one_core_to_encode():
    assert seats(machine([2], gpu_nodes=[0])) == [("encoder/0", "cpu", 0, "1", 1), ("pd/0", "cuda:0", 0, "0", 1)]


def test_operator_chooses_how_many_gpus_encode():
    assert [seat[:2] for seat in seats(machine([16], gpu_nodes=[0] * 5), pd_workers=3, encoder_workers=2)] == [
        ("encoder/0", "cuda:0"), ("encoder/1", "cuda:1"), ("pd/0", "cuda:2"), ("pd/1", "cuda:3"), ("pd/2", "cuda:4")]


def test_more_encoders_than_nodes_split_the_cores():
    assert seats(machine([8, 8]), encoder_workers=4) == [
        ("encoder/0", "cpu", 0, "1-3", 3), ("encoder/1", "cpu", 0, "4-7", 4),
        ("encoder/2", "cpu", 1, "12-13", 2), ("encoder/3", "cpu", 1, "14-15", 2), ("pd/0", "cpu", 1, "8-11", 4)]


def test_more_workers_than_cores_share_them_with_one_thread_each():
    assert seats(machine([2], threads=1), encoder_workers=3, pd_workers=2) == [
        ("encoder/0", "cpu", 0, "0", 1), ("encoder/1", "cpu", 0, "1", 1), ("encoder/2", "cpu", 0, "0", 1),
        ("pd/0", "cpu", 0, "0", 1), ("pd/1", "cpu", 0, "1", 1)]


def test_threads_of_one_role_leave_the_rest_to_the_other():
    assert seats(machine([7]), encoder_threads=5) == [("encoder/0", "cpu", 0, "2-6", 5), ("pd/0", "cpu", 0, "0-1", 2)]
    assert seats(machine([7]), pd_threads=1) == [("encoder/0", "cpu", 0, "1-6", 6), ("pd/0", "cpu", 0, "0", 1)]


def test_without_a_node_that_has_memory_all_cpus_are_one_unbound_domain():
    topology = machine([2, 2], node_memory=0)
    assert seats(replace(topology, memory_bytes=16 * GIB)) == [
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
    spec = placement.plan(machine([2]), config(model_dtype="bfloat16", model_context_max=2048, pd_token_budget=64,
                                               pd_batch_max=3, log_level="debug"), FAMILY, ARENA)[-1]
    assert (spec.model, spec.dtype, spec.context_max) == (FAMILY.folder, "bfloat16", 2048)
    assert (spec.token_budget, spec.batch_max, spec.log_level) == (64, 3, "debug")


def test_arena_size():
    image = FAMILY.embedding_bytes(FAMILY.rows_max)
    assert image == 40 << 20
    assert placement.arena_bytes(config(), machine([2]), FAMILY) == 4 * GIB
    assert placement.arena_bytes(config(), machine([2], node_memory=GIB), FAMILY) == GIB // 4
    assert placement.arena_bytes(config(), machine([2], node_memory=128 << 20), FAMILY) == 64 << 20
    assert placement.arena_bytes(config(), machine([2], node_memory=None), FAMILY) == 4 * GIB
    assert placement.arena_bytes(config(arena_bytes=PAGE + 1), machine([2]), FAMILY) == 2 * PAGE
    large = replace(FAMILY, max_pixels=16 << 20)
    assert placement.arena_bytes(config(), machine([2], node_memory=GIB), large) == 640 << 20
    with pytest.raises(PlacementError, match="the largest image's embedding is 640 MiB; the machine has 512 MiB"):
        placement.arena_bytes(config(), machine([2], node_memory=512 << 20), large)
    with pytest.raises(PlacementError, match="arena.bytes is 999 GiB"):
        placement.arena_bytes(config(arena_bytes=999 * GIB), machine([2]), FAMILY)


topologies = st.builds(
    machine, st.lists(st.integers(1, 24), min_size=1, max_size=6), threads=st.sampled_from([1, 2, 4]),
    gpu_nodes=st.lists(st.sampled_from([None, 0, 1, 7]), max_size=9),
    node_memory=st.sampled_from([None, GIB, 512 * GIB]))


@settings(max_examples=300, deadline=None)
@given(topologies, st.integers(0, 9), st.integers(0, 9), st.integers(0, 4), st.integers(0, 4))
def test_any_plan_is_sound(topology, encoders, pds, encoder_threads, pd_threads):
    asked = config(encoder_workers=encoders, pd_workers=pds, encoder_threads=encoder_threads, pd_threads=pd_threads)
    try:
        specs = placement.plan(topology, asked, FAMILY, ARENA)
    except PlacementError:
        # Refusing is for what the operator asked; left alone, every machine gets a plan.
        assert pds > len(topology.gpus) > 0 or max(encoder_threads, pd_threads) > 1
        return
    cpus = {cpu.id: cpu for cpu in topology.cpus}
    roles = [spec.role for spec in specs]
    assert roles.count("encoder") >= 1 and roles.count("pd") >= 1
    assert not encoders or roles.count("encoder") == encoders
    assert not pds or roles.count("pd") == pds
    assert len({spec.name for spec in specs}) == len(specs)
    gpus = [spec.device for spec in specs if spec.device != "cpu"]
    assert len(set(gpus)) == len(gpus)
    for spec in specs:
        assert spec.threads == len(spec.cpus) >= 1
        assert {cpus[cpu].node for cpu in spec.cpus} == {spec.numa_node}
        assert len({cpus[cpu].core for cpu in spec.cpus}) == spec.threads, "two threads on one core"
        wanted = encoder_threads if spec.role == "encoder" else pd_threads
        assert spec.device != "cpu" or not wanted or spec.threads == wanted
    slices = [spec.arena_slice for spec in specs if spec.role == "encoder"]
    assert sum(size for _, size in slices) == ARENA
    wide = [spec for spec in specs if spec.threads > 1]
    for spec in wide:       # only workers of one thread may share a core
        others = {cpu for other in specs if other is not spec for cpu in other.cpus}
        assert not others & set(spec.cpus)
    assert len(placement.explain(specs, topology).splitlines()) >= len(specs) + 4


def test_explain():
    topology = machine([16, 16], gpu_nodes=[1])
    text = placement.explain(placement.plan(topology, config(), FAMILY, ARENA), topology)
    assert text == """\
Xeon: 2 sockets, 2 NUMA nodes, 32 cores (64 CPUs), 256 GiB memory, 1 x H200, AMX

WORKER     DEVICE  NUMA  CPUS   THREADS  MEMORY
encoder/0  cpu     0     1-15   15       arena 2 GiB
encoder/1  cpu     1     17-31  15       arena 2 GiB
pd/0       cuda:0  1     16     1        KV 8 GiB

left to the daemon and the system: CPUs 0,32-63"""
