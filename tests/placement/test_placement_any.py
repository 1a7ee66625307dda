"""Any topology, any demand: a plan is sound or refused."""

import re
from collections import Counter

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from epdd import placement
from epdd.errors import PlacementError
from epdd.hardware import sysfs
from epdd.hardware.topology import Cpu, Gpu, NumaNode, Topology, ranges
from epdd.settings.config import Config
from epdd.settings.worker_overrides import WorkerOverride
from tests.placement.machines import FAMILY, GIB

ARENA = 4 * GIB


@st.composite
def topologies(draw):
    """Sparse node ids, nodes without memory, without CPUs, or barred; CPUs in no node; cpusets; hybrid cores."""
    ids = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True).map(sorted))
    threads, hybrid = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    cpus, nodes, first = [], [], 0
    for node in ids:
        own = []
        for _ in range(draw(st.integers(0, 12))):
            siblings = tuple(range(first, first + threads))
            first += threads
            usable = tuple(cpu for cpu in siblings if draw(st.integers(0, 9)))
            kind = draw(st.sampled_from("PE")) if hybrid else ""
            place = node if draw(st.integers(0, 9)) else None
            own += [Cpu(cpu, siblings[0], node // 4, place, usable, kind) for cpu in usable]
        nodes.append(NumaNode(node, tuple(cpu.id for cpu in own), draw(st.sampled_from([None, 0, GIB, 512 * GIB])),
                              tuple((other, 10 + 10 * abs(node - other)) for other in ids),
                              memory_allowed=draw(st.integers(0, 5)) > 0))
        cpus += own
    assume(cpus)
    gpus = [Gpu(i, "H200", 141 * GIB, f"0000:{i:02x}:00.0", node, ())
            for i, node in enumerate(draw(st.lists(st.sampled_from([None, *ids, 99]), max_size=9)))]
    return Topology(tuple(cpus), tuple(nodes), tuple(gpus), draw(st.sampled_from([None, 512 * GIB])),
                    cpu_quota=draw(st.sampled_from([None, None, 0.5, 3.0, 100.0])))


def decide(topology, **asked):
    config = Config()
    for name, value in asked.items():
        section, key = name.split("_", 1)
        config = config.with_values(section, {key: value}, "test")
    return placement.decide(topology, config, FAMILY, ARENA)


def check(topology, plan):
    """Invariants of every plan."""
    cpus = {cpu.id: cpu for cpu in topology.cpus}
    nodes = {node.id: node for node in topology.nodes}
    specs = plan.specs
    assert {spec.role for spec in specs} == {"encoder", "pd"}
    assert len({spec.name for spec in specs}) == len(specs)
    devices = [(spec.role, spec.device) for spec in specs if spec.device != "cpu"]
    assert len(set(devices)) == len(devices)
    placed = Counter(cpus[cpu].core for spec in specs for cpu in spec.cpus)
    for spec in specs:
        assert spec.threads == len(spec.cpus) == len({cpus[cpu].core for cpu in spec.cpus}) >= 1
        if spec.numa_node is not None:
            assert nodes[spec.numa_node].has_memory
            assert {cpus[cpu].node for cpu in spec.cpus} == {spec.numa_node}
        crowd = [other for other in specs if other.numa_node == spec.numa_node]
        there = {cpu.core for cpu in topology.cpus if cpu.node == spec.numa_node or spec.numa_node is None}
        if topology.cpu_quota is None and len(crowd) <= len(there):
            assert all(placed[cpus[cpu].core] == 1 for cpu in spec.cpus), "a core was given twice"
        elif any(placed[cpus[cpu].core] > 1 for cpu in spec.cpus):
            assert spec.threads == 1, "a wide worker shares a core"
    if topology.cpu_quota is not None:
        assert len(placed) <= max(1, int(topology.cpu_quota))
    slices = [spec.arena_slice for spec in specs if spec.role == "encoder"]
    assert sum(size for _, size in slices) == ARENA
    told = {node for reason in plan.why if (found := re.match(r"NUMA nodes? (\S+) ha\w+ no worker: .", reason))
            for node in sysfs.parse(found[1])}
    assert told == set(nodes) - {spec.numa_node for spec in specs}, "a node without a worker and without a reason"
    assert [reason.split(" ")[0] for reason in plan.why[-len(specs):]] == [spec.name for spec in specs]


@settings(max_examples=300, deadline=None)
@given(topologies())
def test_left_alone_every_machine_gets_a_sound_plan(topology):
    plan = decide(topology)
    check(topology, plan)
    usable = {node.id for node in topology.nodes if node.has_memory
              and any(cpu.node == node.id for cpu in topology.cpus)}
    if topology.cpu_quota is None:
        assert {spec.numa_node for spec in plan.specs} == (usable or {None})
    assert {spec.device for spec in plan.specs} - {"cpu"} == ({f"cuda:{gpu.index}" for gpu in topology.gpus})
    assert len(placement.explain(plan.specs, topology, plan.why).splitlines()) >= len(plan.specs) + len(plan.why) + 4


@settings(max_examples=300, deadline=None)
@given(topologies(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 4), st.integers(0, 4))
def test_numbers_are_obeyed_or_refused(topology, encoders, pds, encoder_threads, pd_threads):
    try:
        plan = decide(topology, encoder_workers=encoders, pd_workers=pds, encoder_threads=encoder_threads,
                      pd_threads=pd_threads)
    except PlacementError:
        assert pds > len(topology.gpus) > 0 or max(encoder_threads, pd_threads) > 1
        return
    check(topology, plan)
    roles = Counter(spec.role for spec in plan.specs)
    assert roles["encoder"] == encoders or not encoders
    assert roles["pd"] == pds or not pds
    for spec in plan.specs:
        wanted = encoder_threads if spec.role == "encoder" else pd_threads
        assert spec.device != "cpu" or not wanted or spec.threads == wanted


counts = st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(sum)


@settings(max_examples=200, deadline=None)
@given(topologies(), counts, counts)
def test_devices_are_obeyed_or_refused(topology, encoders, pds):
    text = ["gpu:{},cpu:{}".format(*number) for number in (encoders, pds)]
    try:
        plan = decide(topology, encoder_workers=text[0], pd_workers=text[1])
    except PlacementError as error:
        assert max(encoders[0], pds[0]) > len(topology.gpus)
        assert f"that takes {encoders[0] + pds[0]} GPU" in error.message
        return
    check(topology, plan)
    found = Counter((spec.role, spec.device != "cpu") for spec in plan.specs)
    assert [(found["encoder", True], found["encoder", False]), (found["pd", True], found["pd", False])] == [
        encoders, pds]


@settings(max_examples=200, deadline=None)
@given(topologies(), st.data())
def test_tables_are_obeyed_or_refused(topology, data):
    """Encoders with given CPUs have them alone; the others are placed around them."""
    cpus = sorted(cpu.id for cpu in topology.cpus)
    chosen = data.draw(st.lists(st.sampled_from(cpus), min_size=1, max_size=4, unique=True))
    config = Config(worker=(WorkerOverride("encoder", cpus=tuple(sorted(chosen))),))
    cores = {cpu.core for cpu in topology.cpus if cpu.id in chosen}
    try:
        plan = placement.decide(topology, config, FAMILY, ARENA)
    except PlacementError as error:
        assert "take all" in error.message
        return
    assert [ranges(spec.cpus) for spec in plan.specs if spec.role == "encoder"] == [ranges(chosen)]
    assert plan.specs[0].threads == len(cores)
    others = {cpu for spec in plan.specs[1:] for cpu in spec.cpus}
    assert not {cpu.core for cpu in topology.cpus if cpu.id in others} & cores
