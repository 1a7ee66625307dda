"""Invariants of the real router for any fleet, traffic, policy and deaths, on the simulator's engine."""

import math
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epdd.dispatch.routing.router import cpu_budget
from epdd.emulated_time import EncoderGroup, Formula, Slow
from tools.simulate import scenarios
from tools.simulate.comparison import BY_NAME
from tools.simulate.simulator import Death, Encoder, Request, Rule, simulate

POLICIES = ["budget", "earliest", "least-loaded", "round-robin", "gpu-only"]

groups = st.builds(
    EncoderGroup, kind=st.sampled_from(["cpu", "gpu"]), count=st.just(1),
    seconds=st.builds(Formula, a=st.floats(0.001, 1), b=st.floats(0, 1e-3), c=st.floats(0, 1e-7)),
    jitter=st.sampled_from([0.0, 0.3]), slow=st.sampled_from([(), (Slow(1.0, 3.0),), (Slow(0.5, 9.0), Slow(2.0, 0.5))]))
fleets = st.lists(groups, min_size=1, max_size=6).map(
    lambda found: [Encoder(f"encoder/{i}", group) for i, group in enumerate(found)])
images = st.lists(st.integers(1, 32640), max_size=8).map(tuple)
traffic = st.lists(st.builds(Request, st.floats(0, 5), images), max_size=25).map(sorted)
rules = st.builds(
    Rule, st.just("rule"), st.sampled_from(POLICIES), st.sampled_from(["request", "image", "patch"]),
    st.sampled_from([0.0, 0.5, 12.0, 1000.0]), st.sampled_from([0.0, 1.0, 4.0]),
    st.sampled_from([0.0, 0.25, math.inf]), st.booleans())


@st.composite
def fleets_that_lose(draw):
    """A fleet, and which of its encoders are lost when."""
    fleet = draw(fleets)
    name = st.sampled_from([encoder.name for encoder in fleet])
    return fleet, draw(st.lists(st.builds(Death, st.floats(0, 8), name, st.floats(0, 5)), max_size=6))


class Watch:
    """Checks after each round of decisions, and at the end."""

    def __init__(self):
        self.router = None

    def __call__(self, now, router):
        self.router = router
        replicas = router.replicas.in_service()
        # Invariant: work never waits beside a fleet that does nothing.
        assert not router.queue or not replicas or any(replica.held for replica in replicas)
        assert router.waiting == pytest.approx(sum(job.cost(router.replicas.unit) for job in router.queue))

    def at_rest(self):
        assert not self.router.queue and self.router.waiting == 0
        assert self.router.replicas.in_flight == {"cpu": 0.0, "gpu": 0.0}
        assert not any(replica.held for replica in self.router.replicas.by_name.values())


@settings(max_examples=300, deadline=None)
@given(fleets_that_lose(), traffic, rules, st.integers(0, 9))
def test_every_image_is_encoded_once_whatever_dies(fleet_and_deaths, requests, rule, seed):
    fleet, deaths = fleet_and_deaths
    watch = Watch()
    outcome = simulate(fleet, requests, rule, deaths=deaths, seed=seed, watch=watch)
    assert outcome.stuck == 0
    for i, request in enumerate(requests):
        encoded = [done for done in outcome.encoded if done.request == i]
        failed = [work for work in outcome.failed if work.request == i]
        assert sum(done.images for done in encoded) + sum(len(work.parts) for work in failed) == len(request.images)
        assert sum(done.patches for done in encoded) + sum(work.patches for work in failed) == sum(request.images)
    # An image may crash two encoders at most.
    assert all(work.attempts == 2 for work in outcome.failed) and (len(deaths) > 1 or not outcome.failed)
    if any(request.images for request in requests):
        watch.at_rest()


@settings(max_examples=100, deadline=None)
@given(fleets, st.lists(st.builds(Request, st.floats(0, 1), images), min_size=1, max_size=10).map(sorted), rules,
       st.data())
def test_what_a_dead_encoder_held_is_placed_again(fleet, requests, rule, data):
    name = data.draw(st.sampled_from([encoder.name for encoder in fleet]))
    watch = Watch()
    outcome = simulate(fleet, requests, rule, deaths=[Death(1.0, name, 1e6)], watch=watch)
    others = [encoder for encoder in fleet if encoder.name != name]
    assert not outcome.failed and sum(done.images for done in outcome.encoded) == sum(len(r.images) for r in requests)
    assert not others or outcome.stuck == 0
    assert not any(1.0 < done.ended < 1e6 for done in outcome.encoded if done.encoder == name)


# Proportional times without jitter: the fleet's patches a second are the same whatever the traffic.
steady = st.lists(st.builds(
    EncoderGroup, kind=st.sampled_from(["cpu", "gpu"]), count=st.just(1),
    seconds=st.builds(Formula, b=st.floats(1e-5, 1e-3))), min_size=1, max_size=5).map(
    lambda found: [Encoder(f"encoder/{i}", group) for i, group in enumerate(found)])


@settings(max_examples=100, deadline=None)
@given(steady, traffic, st.sampled_from(POLICIES), st.sampled_from([0.0, 0.5, 1.0, 4.0]))
def test_nobody_is_overtaken_by_one_that_came_much_later(fleet, requests, policy, slack):
    """In the queue, none passes that arrived later by over `slack` times the seconds of the request's work."""
    rate = sum(1 / encoder.group.seconds.b for encoder in fleet)

    def watch(now, router):
        newest_before = 0.0
        for job in router.queue:
            assert newest_before <= job.queued + slack * job.request_patches / rate + 1e-6
            newest_before = max(newest_before, job.queued)

    simulate(fleet, requests, Rule("rule", policy, slack=slack), watch=watch)


@pytest.mark.parametrize("policy", ["earliest", "least-loaded"])
@pytest.mark.parametrize("slack", [0.0, 1.0, 4.0])
def test_a_large_request_is_not_starved_by_small_ones(policy, slack):
    """1.5 times as many small requests as the fleet can do, for a minute, and one of eight 4K images early on."""
    fleet = scenarios.fleet("gpu:1@0/1.35e-5,cpu:4@0/1.62e-4")
    rate = sum(1 / encoder.group.seconds.b for encoder in fleet)        # patches a second
    small = [Request(i * 784 / (1.5 * rate), (784,)) for i in range(int(60 * 1.5 * rate / 784))]
    large = Request(5.0, (32640,) * 8)
    outcome = simulate(fleet, sorted([*small, large]), Rule("rule", policy, slack=slack))
    due = large.at + slack * sum(large.images) / rate
    # Requests that arrived before it was due may go first; then a replica is free within its longest image.
    before = sum(sum(request.images) for request in small if request.at <= due) + sum(large.images)
    longest = max(encoder.group.image_seconds(32640) for encoder in fleet)
    started = [done.started for done in outcome.encoded if done.patches == 32640]
    assert len(started) == 8 and max(started) <= max(due, before / rate) + longest


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0])
def test_earliest_is_never_worse_than_the_gpu_alone(rate):
    fleet, tolerance = scenarios.fleet(scenarios.TABLE_FLEET), 1.01
    for seed in range(6):
        requests = scenarios.poisson(rate, 120, scenarios.equal(8), seed)
        alone, earliest = (simulate(fleet, requests, BY_NAME[name]) for name in ("gpu-only", "earliest"))
        for share in (0.5, 0.99):
            assert earliest.percentile(share) <= tolerance * alone.percentile(share), (seed, share)


EDGES = [1, 2, 3, 7, 11, 12, 97, 499, 997, 1000]


def test_the_budget_is_the_formula_for_integers():
    """All loads up to 1,000 beside counts and ratios at the edges."""
    for cpus, gpus, ratio in product(EDGES, EDGES, EDGES):
        over, under = cpus, ratio * gpus
        for load in range(1001):
            budget = cpu_budget(load, cpus, gpus, ratio)
            least_at_or_over = -(-load * over // under)
            # Just under the budget, and at or just over it: all other loads of CPUs lie beyond these two.
            assert least_at_or_over - 1 < budget <= least_at_or_over


@given(*[st.integers(0, 1000)] * 2, *[st.integers(1, 1000)] * 3)
def test_the_budget_decides_as_exact_fractions_do(gpu_load, cpu_load, cpus, gpus, ratio):
    budget = cpu_budget(gpu_load, cpus, gpus, ratio)
    exact = Fraction(gpu_load * cpus, ratio * gpus)
    assert budget == float(exact) and (cpu_load < budget) == (cpu_load < exact)
