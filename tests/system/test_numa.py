"""epdd.service under systemd on a machine with four NUMA nodes and a fifth of memory alone: the real probe, placement,
binding and supervisor, while CPUs and memory nodes go and come.
"""

import json

import pytest

from epdd.hardware import sysfs
from tests.system import numa_machine

pytestmark = [pytest.mark.slow, pytest.mark.takes(240)]

CPUS_OF = {0: {0, 1}, 1: {2, 3}, 2: {4, 5}, 3: {6, 7}}
# -c, because a main module would be imported again in every worker.  Long limits, because all is emulated.
DROP_IN = """
WatchdogSec=10min
Environment=EPDD_FLEET_STALL_S=120
Environment=EPDD_ARENA_BYTES=20971520
ExecStart=
ExecStart=/opt/epdd/venv/bin/python -c 'from tests.system import numa_daemon; numa_daemon.main()'
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The guest's results; it is booted once."""
    reason = numa_machine.missing()
    if reason:
        pytest.skip(f"no NUMA machine: {reason}")
    printed = numa_machine.run("tests.system.numa_guest", DROP_IN, tmp_path_factory.mktemp("numa"))
    _, _, line = printed.rpartition("## FOUND ")
    assert line.startswith("{"), printed[-20000:]
    return json.loads(line.splitlines()[0])


def check(service, nodes, cpus):
    """Each worker has exactly its CPUs, all of one of `nodes`, and memory of that node alone; no CPU is left over."""
    workers = service["workers"]
    for name, worker in workers.items():
        node = worker["node"]
        assert node in nodes, name
        assert set(worker["planned_cpus"]) <= CPUS_OF[node] & cpus, name
        assert [sysfs.parse(told) for told in worker["cpus"]] == [set(worker["planned_cpus"])], name
        assert (worker["policy"], worker["pages"], worker["warning"]) == ([f"bind:{node}"], [f"N{node}"], ""), name
        assert worker["threads"] == worker["planned_threads"] == len(worker["planned_cpus"]), name
        assert worker["pid"] in service["processes"], name
    assert {cpu for worker in workers.values() for cpu in worker["planned_cpus"]} == cpus
    encoding = {worker["node"] for worker in workers.values() if worker["device"] == "cpu"}
    assert encoding == set(nodes), "a node without a worker"


def same_placements(before, after):
    """Names of the workers whose placement is the same."""
    return [name for name, worker in after["workers"].items() if name in before["workers"] and all(
        worker[part] == before["workers"][name][part] for part in ("device", "node", "planned_cpus"))]


def kept(before, after):
    """Whether some workers have the same placement, those run in the same processes, and all others are gone."""
    same = same_placements(before, after)
    for name, worker in before["workers"].items():
        assert (worker["pid"] in after["processes"]) == (name in same), name
    for name in same:
        assert after["workers"][name]["pid"] == before["workers"][name]["pid"], name
    return len(same) > 0


def test_the_same_daemon_served_all_the_time(found):
    assert len({service["daemon"] for service in found["running"].values()}) == 1


def test_topology(found):
    assert found["topology"] == {
        "sockets": 2, "gpus": [None, 0, 2],
        "nodes": {"0": [[0, 1], True], "1": [[2, 3], True], "2": [[4, 5], True], "3": [[6, 7], True], "4": [[], True]},
        "distances": {"0": 10, "1": 12, "2": 21, "3": 21, "4": 28}}


def test_whole_machine(found):
    service = found["running"]["whole"]
    check(service, [0, 1, 2, 3], set(range(8)))
    workers = service["workers"].values()
    assert all(worker["arena"] in ([], [f"N{worker['node']}"]) for worker in workers)
    assert sum(worker["arena"] != [] for worker in workers) == 5        # each encoder has its slice, no other
    devices = {worker["device"]: worker["node"] for worker in workers if worker["device"] != "cpu"}
    assert (devices["cuda:1"], devices["cuda:2"]) == (0, 2)


def test_a_cpu_switched_off_and_on(found):
    before, off, on = (found["running"][stage] for stage in ("whole", "offline", "online again"))
    check(off, [0, 1, 2, 3], set(range(7)))
    check(on, [0, 1, 2, 3], set(range(8)))
    assert [worker["planned_cpus"] for worker in off["workers"].values() if worker["node"] == 3] == [[6]]
    assert kept(before, off) and kept(off, on)


def test_allowed_cpus_and_nodes_shrink_under_the_running_service(found):
    before, after = found["running"]["online again"], found["running"]["shrunk"]
    check(after, [0, 1], {0, 1, 2, 3})
    assert len(after["workers"]) < len(before["workers"])
    assert kept(before, after)


def test_allowed_cpus_and_nodes_are_given_back(found):
    before, after = found["running"]["shrunk"], found["running"]["widened"]
    check(after, [0, 1, 2, 3], set(range(8)))
    assert kept(before, after)


def test_allowed_nodes_that_move_take_no_policy_with_them(found):
    before, after = found["running"]["widened"], found["running"]["moved"]
    check(after, [1, 2], {2, 3, 4, 5})
    assert same_placements(before, after), "a worker that moves starts anew: its policy would be right in any case"


def test_started_within_the_units_cpuset_and_memory_policy(found):
    check(found["within limits"], [1, 2], {2, 3, 4, 5})
