"""A process's binding in /proc, in all its formats; and this process's own."""

import os
import threading

import pytest

from epdd.hardware import binding


def process(folder, maps, cpuset="0-3"):
    (folder / "numa_maps").write_text(f"55d0c0000000 {maps} file=/usr/bin/python3 mapped=2 N0=2\n7f bind:9 anon=1\n")
    (folder / "status").write_text(f"Name:\tepdd\nMems_allowed:\t0f\nMems_allowed_list:\t{cpuset}\n")
    return folder


@pytest.mark.parametrize("maps, policy, allowed, bound", [
    ("default", ("default", set()), {0, 1, 2, 3}, ()),
    ("bind:1", ("bind", {1}), {1}, (1,)),
    ("bind:0,2-3", ("bind", {0, 2, 3}), {0, 2, 3}, (0, 2, 3)),
    ("bind=static:2", ("bind", {2}), {2}, (2,)),
    ("prefer:1", ("prefer", {1}), {0, 1, 2, 3}, ()),
    ("interleave:0-3", ("interleave", {0, 1, 2, 3}), {0, 1, 2, 3}, ()),
    ("local", ("local", set()), {0, 1, 2, 3}, ()),
])
def test_policies(tmp_path, maps, policy, allowed, bound):
    folder = process(tmp_path, maps)
    assert binding.policy(folder) == policy
    assert binding.allowed_nodes(folder) == allowed
    assert binding.memory_nodes(folder) == bound


def test_the_only_node_of_a_cpuset_is_where_memory_is_bound(tmp_path):
    assert binding.memory_nodes(process(tmp_path, "default", "2")) == (2,)


def test_where_proc_is_silent_nothing_is_claimed(tmp_path):
    assert binding.policy(tmp_path) == ("", set())
    assert (binding.allowed_nodes(tmp_path), binding.memory_nodes(tmp_path)) == (set(), ())


def test_each_thread_has_its_own_cpus():
    told, done = threading.Event(), threading.Event()
    one = {min(os.sched_getaffinity(0))}

    def bound():
        os.sched_setaffinity(0, one)
        told.set()
        done.wait()

    thread = threading.Thread(target=bound)
    thread.start()
    told.wait()
    try:
        found = binding.threads(os.getpid())
        assert found[thread.native_id] == one
        assert found[os.getpid()] == os.sched_getaffinity(0)
    finally:
        done.set()
        thread.join()
    assert binding.threads(1 << 22) == {}
