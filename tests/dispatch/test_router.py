"""The router's rules on numbers worked out by hand, and properties no fleet may break."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd.dispatch.router import Candidate, Pools, Router

POLICIES = ["budget", "earliest", "least-loaded", "round-robin", "gpu-only"]


def fleet(cpu, gpu, ratio=12.0, waiting=0.0, full=()):
    """CPU and GPU encoders with these amounts in flight."""
    return Pools([Candidate(f"{kind}{i}", kind, load, free=f"{kind}{i}" not in full)
                  for kind, loads in (("cpu", cpu), ("gpu", gpu)) for i, load in enumerate(loads)], ratio, waiting)


def test_budget_is_the_published_formula():
    assert fleet([0, 0, 0, 0], [6.0]).cpu_budget == pytest.approx(6 * 4 / (12 * 1))
    assert fleet([0, 0], [3.0, 5.0], ratio=4).cpu_budget == pytest.approx(8 * 2 / (4 * 2))
    assert fleet([0, 0, 0, 0], [6.0], waiting=18).cpu_budget == pytest.approx(24 * 4 / 12)
    assert fleet([1.0], []).cpu_budget == float("inf")


@pytest.mark.parametrize("cpu, gpu, waiting, expected", [
    ([0, 0, 0, 0], [0.0], 0, "gpu0"),       # B = 0: the GPU first
    ([0, 0, 0, 0], [1.0], 0, "cpu0"),       # B = 1/3 > 0
    ([1, 0, 0, 0], [2.0], 0, "gpu0"),       # B = 2/3 <= 1
    ([1, 0, 0, 0], [2.0], 4, "cpu1"),       # waiting work counts on the GPU's side: B = 2 > 1
    ([1, 1, 1, 0], [9.0], 0, "gpu0"),       # B = 3, not below
    ([1, 1, 1, 0], [9.1], 0, "cpu3"),       # real-valued
])
def test_budget_routes(cpu, gpu, waiting, expected):
    assert Router("budget").pick(fleet(cpu, gpu, waiting=waiting)).worker == expected


def test_budget_waits_or_uses_a_free_gpu_when_the_cpus_are_full():
    assert Router("budget").pick(fleet([0.0], [5.0], full=("cpu0",))).worker == "gpu0"
    assert Router("budget").pick(fleet([0.0], [5.0], full=("cpu0", "gpu0"))).worker is None
    assert Router("budget").pick(fleet([9.0], [1.0], full=("gpu0",))).worker is None   # over budget: CPUs wait


def test_earliest_counts_backlog_and_this_job():
    slow = Candidate("cpu0", "cpu", 0, True, seconds_left=0.0, seconds_for_job=1.3)
    fast = Candidate("gpu0", "gpu", 9, True, seconds_left=1.0, seconds_for_job=0.1)
    assert Router("earliest").pick(Pools([slow, fast], 12)).worker == "gpu0"
    later = Candidate("gpu0", "gpu", 9, True, seconds_left=1.3, seconds_for_job=0.1)
    assert Router("earliest").pick(Pools([slow, later], 12)).worker == "cpu0"
    full = Candidate("gpu0", "gpu", 9, False, seconds_left=1.0, seconds_for_job=0.1)
    assert Router("earliest").pick(Pools([slow, full], 12)).worker is None      # worth waiting for


@pytest.mark.parametrize("waiting, expected", [(0, None), (2, None), (3, "cpu0"), (50, "cpu0")])
def test_earliest_uses_a_slow_worker_when_the_queue_behind_is_long_enough(waiting, expected):
    # The GPU takes the head at 1.0 + 0.1 s and those behind it 0.1 s later each: the fourth ends at 1.4 > 1.35.
    slow = Candidate("cpu0", "cpu", 0, True, seconds_left=0.0, seconds_for_job=1.35)
    fast = Candidate("gpu0", "gpu", 2, False, seconds_left=1.0, seconds_for_job=0.1)
    assert Router("earliest").pick(Pools([slow, fast], 12, waiting=waiting * 784.0, cost=784.0)).worker == expected


def test_round_robin_takes_turns_and_keeps_a_turn_while_waiting():
    router = Router("round-robin")
    assert [router.pick(fleet([0, 0], [0.0])).worker for _ in range(4)] == ["cpu0", "cpu1", "gpu0", "cpu0"]
    assert router.pick(fleet([0, 0], [0.0], full=("cpu1",))).worker is None
    assert router.pick(fleet([0, 0], [0.0])).worker == "cpu1"


def test_gpu_only_never_uses_a_cpu_while_there_is_a_gpu():
    assert Router("gpu-only").pick(fleet([0], [99.0])).worker == "gpu0"
    assert Router("gpu-only").pick(fleet([0], [99.0], full=("gpu0",))).worker is None
    assert Router("gpu-only").pick(fleet([0], [])).worker == "cpu0"


candidates = st.lists(st.builds(
    Candidate, name=st.uuids().map(str), kind=st.sampled_from(["cpu", "gpu"]), in_flight=st.floats(0, 1e4),
    free=st.booleans(), seconds_left=st.floats(0, 100), seconds_for_job=st.floats(0.001, 100)), max_size=12)


@given(candidates, st.floats(0.1, 1000), st.floats(0, 1e5), st.sampled_from(POLICIES))
def test_only_a_free_worker_is_ever_chosen(fleet_now, ratio, waiting, policy):
    chosen = Router(policy).pick(Pools(fleet_now, ratio, waiting)).worker
    assert chosen is None or {c.name: c for c in fleet_now}[chosen].free


@given(candidates.filter(bool), st.floats(0.1, 1000), st.sampled_from(POLICIES))
def test_an_idle_fleet_always_takes_a_job(fleet_now, ratio, policy):
    idle = [Candidate(c.name, c.kind, 0.0, True, 0.0, c.seconds_for_job) for c in fleet_now]
    assert Router(policy).pick(Pools(idle, ratio)).worker is not None
