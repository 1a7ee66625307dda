"""The real probe, placement, binding and supervisor on a machine with four NUMA nodes and a fifth of memory alone."""

import json

import pytest

from epdd.hardware import sysfs
from tests.system import numa_machine

pytestmark = pytest.mark.slow

CPUS_OF = {0: {0, 1}, 1: {2, 3}, 2: {4, 5}, 3: {6, 7}}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All that the guest saw; it is booted once."""
    reason = numa_machine.missing()
    if reason:
        pytest.skip(f"no NUMA machine: {reason}")
    printed = numa_machine.run("tests.system.numa_guest", tmp_path_factory.mktemp("numa"))
    _, _, line = printed.rpartition("## FOUND ")
    assert line.startswith("{"), printed[-6000:]
    return json.loads(line.splitlines()[0])


def check(fleet, nodes, cpus):
    """Each worker has exactly its CPUs, all of one of `nodes`, and memory of that node alone."""
    for name, worker in fleet.items():
        node = worker["node"]
        assert node in nodes, name
        assert set(worker["spec_cpus"]) <= CPUS_OF[node] & cpus, name
        assert [sysfs.parse(told) for told in worker["cpus"]] == [set(worker["spec_cpus"])], name
        assert (worker["policy"], worker["pages"], worker["warning"]) == ([f"bind:{node}"], [f"N{node}"], ""), name
        assert worker["wanted_threads"] == len(worker["spec_cpus"]), name
    encoding = {worker["node"] for name, worker in fleet.items() if worker["device"] == "cpu"}
    assert encoding == set(nodes), "a node without a worker"


def test_topology(found):
    assert found["topology"] == {
        "sockets": 2, "gpus": [None, 0, 2],
        "nodes": {"0": [[0, 1], True], "1": [[2, 3], True], "2": [[4, 5], True], "3": [[6, 7], True], "4": [[], True]},
        "distances": {"0": 10, "1": 12, "2": 21, "3": 21, "4": 28}}


def test_whole_machine(found):
    fleet = found["running"]["whole"]
    check(fleet, [0, 1, 2, 3], set(range(8)))
    for worker in fleet.values():
        assert worker["threads"] == worker["wanted_threads"]
        assert worker["arena"] in ([], [f"N{worker['node']}"])
    devices = {worker["device"]: worker["node"] for worker in fleet.values() if worker["device"] != "cpu"}
    assert (devices["cuda:1"], devices["cuda:2"]) == (0, 2)
    assert sum(worker["arena"] != [] for worker in fleet.values()) == 5      # each encoder has its slice, no other


def test_a_cpu_switched_off_and_on(found):
    before, off, on = (found["running"][stage] for stage in ("whole", "offline", "online again"))
    check(off, [0, 1, 2, 3], set(range(7)))
    check(on, [0, 1, 2, 3], set(range(8)))
    assert [worker["spec_cpus"] for worker in off.values() if worker["node"] == 3] == [[6]]
    same = [name for name in before if before[name]["spec_cpus"] == off[name]["spec_cpus"]]
    assert len(same) >= 3
    for name, worker in before.items():
        assert (off[name]["pid"] == worker["pid"]) == (name in same), name
        assert on[name]["spec_cpus"] == worker["spec_cpus"]


def test_a_cpuset_that_shrinks_under_running_workers(found):
    before, after = found["running"]["online again"], found["running"]["cpuset shrunk"]
    check(after, [0, 1], {0, 1, 2, 3})
    assert len(after) < len(before)
    kept = [name for name in after if before[name]["spec_cpus"] == after[name]["spec_cpus"]]
    assert kept and all(before[name]["pid"] == after[name]["pid"] for name in kept)


def test_a_cpuset_that_moves_takes_no_policy_with_it(found):
    check(found["running"]["cpuset moved"], [1, 2], {2, 3, 4, 5})


def test_started_under_a_cpuset(found):
    check(found["under a cpuset"], [0, 1], {0, 1, 2, 3})


def test_a_policy_of_the_unit_is_kept_within(found):
    check(found["under a policy"], [1, 2], {2, 3, 4, 5})
    outside = found["outside the policy"]
    assert outside["warning"] == "memory not bound: NUMA node 0 is outside the allowed nodes 1-2"
    assert outside["policy"] == ["bind:1-2"] and set(outside["pages"]) <= {"N1", "N2"}
