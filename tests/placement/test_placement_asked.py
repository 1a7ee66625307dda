"""Placement by operators: counts by device, and [[worker]] tables."""

from dataclasses import replace

import pytest
from msgspec import structs

from epdd import placement
from epdd.errors import PlacementError
from epdd.hardware.topology import NumaNode, ranges
from epdd.settings.config import Config
from epdd.settings.worker_overrides import WorkerOverride
from tests.placement.machines import FAMILY, GIB, machine

ARENA = 4 * GIB


def decide(topology, *overrides, encoder="auto", pd="auto"):
    config = Config().with_values("encoder", {"workers": encoder}, "test").with_values("pd", {"workers": pd}, "test")
    return placement.decide(topology, structs.replace(config, worker=overrides), FAMILY, ARENA)


def placed(*args, **counts):
    return [(spec.name, spec.device, spec.numa_node, ranges(spec.cpus), spec.threads)
            for spec in decide(*args, **counts).specs]


def devices(*args, **counts):
    return [(spec.name, spec.device) for spec in decide(*args, **counts).specs]


def test_how_many_on_which_device():
    five = machine([16] * 4, gpu_nodes=[0, 0, 1, 2, 3])
    assert decide(five, encoder="gpu:1,cpu:4", pd="gpu:4").specs == decide(five).specs
    assert devices(five, encoder="gpu:2", pd="gpu:2, cpu:1") == [
        ("encoder/0", "cuda:0"), ("encoder/1", "cuda:1"), ("pd/0", "cuda:2"), ("pd/1", "cuda:3"), ("pd/2", "cpu")]


def test_the_other_role_gets_the_gpus_that_are_left():
    three = machine([8, 8], gpu_nodes=[0, 0, 1])
    assert devices(three, encoder="cpu:2") == [
        ("encoder/0", "cpu"), ("encoder/1", "cpu"), ("pd/0", "cuda:0"), ("pd/1", "cuda:1"), ("pd/2", "cuda:2")]
    assert devices(three, encoder="gpu:3") == [
        ("encoder/0", "cuda:0"), ("encoder/1", "cuda:1"), ("encoder/2", "cuda:2"), ("pd/0", "cpu")]
    assert devices(three, pd="cpu:1") == [
        *((f"encoder/{i}", f"cuda:{i}") for i in range(3)), ("encoder/3", "cpu"), ("encoder/4", "cpu"), ("pd/0", "cpu")]


def test_tables_are_all_workers_of_their_role_in_their_order():
    assert placed(machine([8, 8], gpu_nodes=[1]), WorkerOverride("encoder", numa_node=1),
                  WorkerOverride("encoder", cpus=(2, 3, 4)),
                  WorkerOverride("encoder", device="gpu:0", numa_node=0)) == [
        ("encoder/0", "cpu", 1, "12-15", 4),
        ("encoder/1", "cpu", 0, "2-4", 3),
        ("encoder/2", "cuda:0", 0, "1,5", 2),
        ("pd/0", "cpu", 1, "8-11", 4)]              # the automatic one shares NUMA node 1, where most cores are free


def test_cores_whose_cpus_are_given_are_nobody_elses():
    """CPU 9 is the second thread of core 1."""
    assert placed(machine([8]), WorkerOverride("pd", cpus=(0, 9))) == [
        ("encoder/0", "cpu", 0, "2-7", 6), ("pd/0", "cpu", 0, "0,9", 2)]


def test_an_encoder_and_a_prefill_decode_worker_share_a_gpu_where_both_are_asked_for():
    one, five = machine([8], gpu_nodes=[0]), machine([16], gpu_nodes=[0] * 5)
    assert devices(one, encoder="gpu:1", pd="gpu:1") == [("encoder/0", "cuda:0"), ("pd/0", "cuda:0")]
    assert devices(five, encoder="gpu:2", pd="gpu:4") == [
        ("encoder/0", "cuda:0"), ("encoder/1", "cuda:1"), *((f"pd/{i}", f"cuda:{i + 1}") for i in range(4))]
    assert devices(one, WorkerOverride("encoder", device="gpu:0"), WorkerOverride("pd", device="gpu:0")) == [
        ("encoder/0", "cuda:0"), ("pd/0", "cuda:0")]
    assert devices(one, WorkerOverride("encoder", device="gpu:0")) == [("encoder/0", "cuda:0"), ("pd/0", "cpu")]


def test_both_threads_of_a_core_are_one_thread_of_the_worker():
    assert placed(machine([4]), WorkerOverride("encoder", cpus=(0, 1, 4, 5)))[0] == (
        "encoder/0", "cpu", 0, "0-1,4-5", 2)


def test_cpus_on_two_nodes_leave_memory_unbound():
    plan = decide(machine([4, 4]), WorkerOverride("encoder", cpus=(3, 4)))
    assert (plan.specs[0].numa_node, plan.specs[0].cpus) == (None, (3, 4))
    assert "encoder/0 (cpu): its CPUs as asked; memory is not bound: " \
           "they are not all in one NUMA node with memory" in plan.why
    bound = decide(machine([4, 4]), WorkerOverride("encoder", cpus=(3, 4), numa_node=1))
    assert (bound.specs[0].numa_node, bound.specs[0].cpus) == (1, (3, 4))
    assert "encoder/0 (cpu): its CPUs as asked" in bound.why


def test_a_gpu_in_a_table_is_not_given_twice():
    assert devices(machine([8], gpu_nodes=[0, 0, 0]), WorkerOverride("encoder", device="gpu:1")) == [
        ("encoder/0", "cuda:1"), ("pd/0", "cuda:0"), ("pd/1", "cuda:2")]


def test_threads_of_a_table():
    assert placed(machine([8], threads=1), WorkerOverride("encoder", threads=2), WorkerOverride("encoder")) == [
        ("encoder/0", "cpu", 0, "5-6", 2), ("encoder/1", "cpu", 0, "7", 1), ("pd/0", "cpu", 0, "1-4", 4)]


@pytest.mark.parametrize("overrides, words", [
    ([WorkerOverride("pd", device="gpu:2")], r"\[\[worker\]\] 0 asks for gpu:2; there are GPUs 0-1"),
    ([WorkerOverride("pd", device="gpu:1"), WorkerOverride("pd", device="gpu:1")],
     "1 asks for gpu:1 for another pd, which .* 0 has"),
    ([WorkerOverride("pd", cpus=(3, 16, 17))], "0 asks for CPUs 16-17; this process may use 0-15"),
    ([WorkerOverride("pd", cpus=(1, 2)), WorkerOverride("encoder", cpus=(2, 3))], "1 asks for CPU 2, which .* 0 has"),
    ([WorkerOverride("pd", cpus=(1, 9), threads=2)], "asks for 2 threads on CPUs 1,9, which are 1 core"),
    ([WorkerOverride("pd", numa_node=7)],
     "NUMA node 7 is asked for: it is not there; NUMA nodes with CPUs and memory: 0-1"),
    ([WorkerOverride("pd", numa_node=2)], "NUMA node 2 is asked for: no CPUs that this process may use; NUMA nodes"),
    ([WorkerOverride("pd", cpus=(1,), numa_node=3)], "NUMA node 3 is asked for: no CPUs .* and no memory"),
    ([WorkerOverride("pd", cpus=(4, 5, 6, 7)), WorkerOverride("encoder", numa_node=1)],
     "NUMA node 1 is asked for: the settings give its co"),
    ([WorkerOverride("pd", numa_node=0, threads=4)],
     "4 physical cores are free on NUMA node 0; asked for: 1 x pd with 4 thread"),
    ([WorkerOverride("encoder", cpus=tuple(range(8)))], r"tables take all 8 cores; 2 more workers need at least one"),
])
def test_the_impossible_is_refused_with_what_is_there(overrides, words):
    topology = machine([4, 4], gpu_nodes=[0, 1])
    odd = replace(topology, nodes=(*topology.nodes, NumaNode(2, (), GIB), NumaNode(3, (), 0)))
    with pytest.raises(PlacementError, match=words):
        decide(odd, *overrides)


def test_no_gpu_is_there():
    with pytest.raises(PlacementError, match="asks for gpu:0; there is no GPU"):
        decide(machine([4]), WorkerOverride("pd", device="gpu:0"))
    with pytest.raises(PlacementError, match="encoder.workers is gpu:1, pd.workers is gpu:2: that takes 3 GPUs; there "
                                             "is 1 GPU"):
        decide(machine([4], gpu_nodes=[0]), encoder="gpu:1", pd="gpu:2")
    with pytest.raises(PlacementError, match="there are 2 GPUs, 1 of them in"):
        decide(machine([4], gpu_nodes=[0, 0]), WorkerOverride("encoder", device="gpu:0"), pd="gpu:2")


def test_every_decision_has_its_reason():
    assert decide(machine([16, 16], gpu_nodes=[1, 0]), WorkerOverride("encoder", device="gpu:1"),
                  WorkerOverride("encoder", cpus=(3,)),
                  pd="gpu:1").why == [
        "32 cores count, not 64 CPUs: a second thread on a core would slow the first",
        "1 core belongs to workers whose cpus are given",
        "encoder: 2 workers as the [[worker]] tables say",
        "pd: 1 on GPUs, 0 on CPUs: asked: gpu:1",
        "CPUs can compute in bfloat16: they have AMX",
        "CPU 0 is kept for the daemon: there are 8 cores or more",
        "GPU 0, 141 GiB: pd/0: activations 653 MiB, contexts 768 MiB, KV cache 131.2 GiB; 8.5 GiB to spare; "
        "the weights' size is not known",
        "GPU 1, 141 GiB: encoder/0: contexts 768 MiB; 140.2 GiB to spare; the weights' size is not known",
        "encoder/0 (cuda:1): 2 cores of NUMA node 0, the GPU's own",
        "encoder/1 (cpu): its CPUs as asked",
        "pd/0 (cuda:0): 1 core of NUMA node 1, the GPU's own"]


def test_reasons_of_a_machine_left_alone():
    assert decide(machine([8, 8], threads=1)).why == [
        "encoder: 0 on GPUs, 2 on CPUs: every NUMA node with CPUs and memory encodes",
        "pd: 0 on GPUs, 1 on CPUs: one is enough to batch all requests",
        "CPUs can compute in bfloat16: they have AMX",
        "CPU 0 is kept for the daemon: there are 8 cores or more",
        "encoder/0 (cpu): the 7 cores left of NUMA node 0",
        "encoder/1 (cpu): 4 of the 8 cores left of NUMA node 1; the two roles get half each",
        "pd/0 (cpu): 4 of the 8 cores left of NUMA node 1; the two roles get half each"]
