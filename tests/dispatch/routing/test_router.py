"""The router's rules on numbers worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd.dispatch.routing.queue import Job, Queue
from epdd.dispatch.routing.router import FORGET_EVERY_S, RETHINK_S, TYPICAL_CHANGE, Router, cpu_budget
from epdd.dispatch.routing.time_models import OBSERVATION_S, TimeModel

PATCHES = 1000
AHEAD_S = 0.25


def model(seconds):
    """So long for PATCHES, in proportion for others."""
    return TimeModel([(PATCHES, seconds)])


def router(policy, unit="image", ratio=12.0, slack=0.0, ahead_s=AHEAD_S, now=0.0, **seconds):
    """With replicas of these names; a name's first three letters are its kind."""
    made = Router(policy, unit, ratio, slack, ahead_s, PATCHES)
    for name, each in seconds.items():
        made.replicas.set_replica(name, name[:3], model(each), True, now)
    return made


def job(patches=PATCHES, **more):
    return Job("r", patches, **more)


def come(router, count, now=0.0, **more):
    jobs = [job(**more) for _ in range(count)]
    for each in jobs:
        router.submit(each, now)
    return jobs


def assigned(router, now=0.0):
    """Names of the replicas that get something now, in order."""
    names = []
    while (choice := router.assign(now)) is not None:
        names.append(choice.replica.name)
    return names


def end(router, name, now):
    """The oldest of a replica's jobs is done."""
    ended = router.replicas.by_name[name].held[0]
    router.ended(ended, now)
    return ended


# --- tenants

@pytest.mark.parametrize("policy", ["budget", "earliest", "least-loaded", "round-robin", "gpu-only"])
def test_many_images_of_one_tenant_do_not_keep_another_waiting(policy):
    made = router(policy, slack=1.0, cpu=1.0)
    come(made, 50, tenant="many")
    come(made, 3, now=0.1, tenant="few", patches=4 * PATCHES)
    order, now = [], 0.1
    while made.queue:
        if choice := made.assign(now):
            order.append(choice.job.tenant)
        now += 0.1
        for held in [*made.replicas.by_name["cpu"].held]:
            if now >= held.started + held.patches / PATCHES:
                made.ended(held, now)
    assert order[:7].count("few") == 3 and order.count("many") == 50
    assert order[:2] != ["many", "many"]


@given(jobs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=30), ended=st.integers(0, 30))
def test_each_next_job_is_of_the_tenant_with_the_fewest(jobs, ended):
    queue, lines = Queue(), {}
    for tenant, due in jobs:
        queue.put(job(tenant=tenant, due=due))
    for _ in range(len(jobs) // 2):
        taken = queue.head()
        queue.remove(taken)
        queue.began(taken)
        lines.setdefault(taken.tenant, []).append(taken)
    for each in [each for line in lines.values() for each in line][:ended]:
        queue.ended(each)
        lines[each.tenant].remove(each)
    before = {tenant: len(line) for tenant, line in lines.items()}
    left, order = list(queue), []
    assert len(left) == len(queue) == len(jobs) - len(jobs) // 2
    for at, each in enumerate(left):
        assert before.get(each.tenant, 0) == min(before.get(other.tenant, 0) for other in left[at:])
        before[each.tenant] = before.get(each.tenant, 0) + 1
        order.append(each)
    for tenant in "abc":
        line = [each.entry[:2] for each in order if each.tenant == tenant]
        assert line == sorted(line)


# --- the weighted rule

def test_budget_is_the_published_formula():
    assert cpu_budget(6, 4, 1, 12) == 6 * 4 / 12
    assert cpu_budget(8, 2, 2, 4) == 8 * 2 / (4 * 2)
    assert cpu_budget(1, 3, 0, 12) == math.inf


def test_budget_counts_what_waits_behind_on_the_gpus_side():
    routing = router("budget", gpu0=0.1, cpu0=1.2, cpu1=1.2, cpu2=1.2, cpu3=1.2)
    come(routing, 14)
    # Of 14 jobs, 13 wait behind the first: B = 13 * 4 / 12 > 0, so a CPU.  Then I_cpu = 1 < 12 / 3, 2 < 11 / 3,
    # 3 < 10 / 3; 4 >= 9 / 3: the GPU, which holds one now and takes another 0.25 s ahead: its queue is 0.1 s long
    # each time, so three more.  Then all are full.
    assert assigned(routing) == ["cpu0", "cpu1", "cpu2", "cpu3", "gpu0", "gpu0", "gpu0"]
    assert routing.waiting == 7
    assert routing.budget(routing.waiting) == pytest.approx((3 + 7) * 4 / 12)


def test_budget_is_real_valued():
    routing = router("budget", ahead_s=math.inf, gpu0=0.1, cpu0=1.2, cpu1=1.2, cpu2=1.2, cpu3=1.2)
    names = []
    for _ in range(9):
        come(routing, 1)
        names += assigned(routing)
    # I_gpu 0: B = 0, GPU.  1: B = 1/3 > 0, CPU.  1 >= 1/3, 2/3, 3/3: GPU until I_gpu = 4, B = 4/3.
    assert names == ["gpu0", "cpu0", "gpu0", "gpu0", "gpu0", "cpu1", "gpu0", "gpu0", "gpu0"]


def test_budget_gives_a_free_gpu_work_though_the_rule_would_let_it_wait_for_a_cpu():
    routing = router("budget", gpu0=0.1, cpu0=1.2)
    come(routing, 40)
    # B = 39 / 12 > 0: a CPU.  Then B = 38 / 12 > 1 says CPU again, which is full: the GPU is free.
    choices = [routing.assign(0.0) for _ in range(2)]
    assert [choice.replica.name for choice in choices] == ["cpu0", "gpu0"]
    assert choices[0].reason == "I_cpu 0 < B_cpu 3.25" and choices[1].reason == "CPU pool full, GPU free"


def test_budget_over_its_measure_waits_for_the_gpu():
    routing = router("budget", ratio=1000.0, gpu0=1.0, cpu0=1.2)
    come(routing, 3)
    # B = 2 / 1000 > 0: a CPU.  I_cpu 1 >= B: the GPU, and the third waits for it.
    assert assigned(routing) == ["cpu0", "gpu0"]
    end(routing, "cpu0", 0.5)
    assert assigned(routing, 0.5) == ["cpu0"]     # I_cpu 0 < (1 + 0) / 1000
    assert routing.waiting == 0


def test_budget_without_gpus_is_without_limit():
    routing = router("budget", cpu0=1.2, cpu1=1.2)
    come(routing, 3)
    assert routing.budget(99) == math.inf and assigned(routing) == ["cpu0", "cpu1"]


@pytest.mark.parametrize("unit, cost", [("patch", 500.0), ("image", 1.0), ("request", 0.25)])
def test_units(unit, cost):
    routing = router("budget", unit, gpu0=0.1)
    come(routing, 1, patches=500, images=4)
    assert routing.waiting == cost
    assigned(routing)
    assert routing.replicas.in_flight == {"cpu": 0.0, "gpu": cost} and routing.waiting == 0


def test_another_unit_at_run_time_counts_all_anew():
    routing = router("budget", "image", gpu0=1.0, cpu0=1.2)
    come(routing, 6, patches=500, images=2)
    names = assigned(routing)
    routing.configure("least-loaded", "patch", 0.0, 0.0, 0.0)
    assert sum(routing.replicas.in_flight.values()) == 500 * len(names)
    assert routing.waiting == 500 * (6 - len(names))
    routing.configure("budget", "request", 0.0, 0.0, 0.0)
    assert sum(routing.replicas.in_flight.values()) == len(names) / 2 and routing.waiting == (6 - len(names)) / 2
    for name in names:
        end(routing, name, 1.0)
    assert routing.replicas.in_flight == {"cpu": 0.0, "gpu": 0.0}


# --- earliest

def test_earliest_counts_backlog_and_this_job():
    routing = router("earliest", ahead_s=math.inf, gpu0=0.1, cpu0=0.35)
    come(routing, 5)
    # The GPU is done at 0.1, 0.2, 0.3 (the CPU would be at 0.35), then the CPU's 0.35 < 0.4; then 0.4.
    assert assigned(routing) == ["gpu0", "gpu0", "gpu0", "cpu0", "gpu0"]


@pytest.mark.parametrize("waiting, taken", [(1, None), (11, None), (12, 11), (40, 11)])
def test_earliest_gives_a_slow_replica_the_first_job_that_the_fast_one_would_not_finish_sooner(waiting, taken):
    routing = router("earliest", ahead_s=0.0, gpu0=0.1, cpu0=1.25)
    come(routing, 1)
    assert assigned(routing) == ["gpu0"]
    jobs = come(routing, waiting)
    # The GPU is done with its own at 0.1 s, with eleven of these at 1.2 s, and the twelfth would be at 1.3 > 1.25 s.
    choice = routing.assign(0.0)
    assert (choice and jobs.index(choice.job)) == taken
    if choice:
        assert choice.replica.name == "cpu0"
        assert choice.reason == "finishes first: faster ones have 11000 patches before it"


def test_earliest_does_not_wait_for_one_that_is_hardly_faster():
    routing = router("earliest", ahead_s=0.0, cpu0=1.0, cpu1=1.05)
    come(routing, 2)
    assert assigned(routing) == ["cpu0", "cpu1"]
    waits = router("earliest", ahead_s=0.0, cpu0=1.0, cpu1=1.9)
    come(waits, 1)
    assert assigned(waits) == ["cpu0"]
    come(waits, 1, now=0.5)
    assert assigned(waits, 0.5) == []           # cpu0 is done with it at 2.0, cpu1 would be at 2.4


def test_earliest_looks_past_its_horizon_at_a_long_queue():
    routing = router("earliest", ahead_s=0.0, gpu0=0.001, cpu0=0.4)
    come(routing, 1)
    assert assigned(routing) == ["gpu0"]
    jobs = come(routing, 300)                     # the GPU does 399 of them in the CPU's time
    assert assigned(routing) == []
    jobs += come(routing, 200)
    choice = routing.assign(0.0)
    assert choice.replica.name == "cpu0" and choice.job is jobs[255]


def test_a_job_that_was_taken_from_further_back_leaves_the_others_in_order():
    routing = router("earliest", ahead_s=0.0, gpu0=0.1, cpu0=0.25)
    jobs = come(routing, 4)
    first, second = routing.assign(0.0), routing.assign(0.0)
    # Done by the GPU after its own: one by 0.2 s, the next at 0.3 > 0.25.
    assert [first.job, second.job] == [jobs[0], jobs[2]]
    assert list(routing.queue) == [jobs[1], jobs[3]]


# --- late binding

def test_a_replica_opens_a_little_before_it_is_done():
    routing = router("gpu-only", gpu0=1.0)
    come(routing, 2)
    assert assigned(routing) == ["gpu0"]
    assert routing.wake_at(0.0) == pytest.approx(1.0 - AHEAD_S)
    assert assigned(routing, 0.7) == [] and assigned(routing, 0.75) == ["gpu0"]
    assert routing.replicas.by_name["gpu0"].until == 2.0 and routing.wake_at(0.75) is None       # nothing waits


def test_one_ahead_no_more():
    routing = router("gpu-only", gpu0=1.0)
    come(routing, 9)
    assigned(routing)
    assert assigned(routing, 0.9) == ["gpu0"] and assigned(routing, 0.95) == []
    assert routing.wake_at(0.95) == pytest.approx(1.75)


def test_a_late_replica_is_taken_to_be_as_late_again_and_opens_when_it_is_done():
    routing = router("gpu-only", gpu0=1.0)
    come(routing, 3)
    assigned(routing)
    assert assigned(routing, 1.3) == []           # 0.3 s late, so 0.3 s more: over AHEAD_S
    end(routing, "gpu0", 2.0)
    assert assigned(routing, 2.0) == ["gpu0"] and routing.replicas.by_name["gpu0"].until == 3.0
    assert assigned(routing, 3.2) == ["gpu0"]     # 0.2 s late: within AHEAD_S


def test_while_another_replica_is_late_what_is_idle_is_asked_again():
    routing = router("earliest", ahead_s=0.0, gpu0=0.1, cpu0=1.0)
    come(routing, 2)
    assert assigned(routing) == ["gpu0"]
    assert routing.wake_at(0.0) == pytest.approx(min(0.1, RETHINK_S))
    assert assigned(routing, 0.6) == []           # 0.5 s late, so 0.5 s more, then 0.1: sooner than the CPU
    assert routing.wake_at(0.6) == pytest.approx(0.6 + RETHINK_S)
    assert assigned(routing, 1.1) == ["cpu0"]     # 1.0 s late


def test_a_replica_that_is_to_drain_gets_nothing_and_what_it_has_is_not_counted():
    routing = router("least-loaded", gpu0=1.0, cpu0=1.0)
    come(routing, 2)
    assert sorted(assigned(routing)) == ["cpu0", "gpu0"]
    replica = routing.replicas.by_name["gpu0"]
    routing.replicas.set_replica("gpu0", "gpu", replica.model, False, 0.1)
    come(routing, 3, now=0.1)
    assert routing.replicas.in_flight == {"cpu": 1.0, "gpu": 0.0} and routing.replicas.count == {"cpu": 1, "gpu": 0}
    end(routing, "gpu0", 1.0)
    assert "gpu0" not in assigned(routing, 1.0)
    routing.replicas.set_replica("gpu0", "gpu", replica.model, True, 1.0)
    assert "gpu0" in assigned(routing, 1.0)


# --- jobs that come back

def test_a_job_that_comes_back_goes_alone_to_an_idle_replica_and_everybody_waits_for_that():
    routing = router("least-loaded", gpu0=1.0, cpu0=9.0)
    first, *_ = come(routing, 2)
    assert assigned(routing) == ["gpu0", "cpu0"]
    come(routing, 1, now=0.1)
    routing.ended(first, 0.1)
    routing.submit_again(first, exclusive=True)
    assert first.worker is None and routing.queue.head() is first      # its old place
    choice = routing.assign(0.1)
    assert choice.job is first and choice.replica.name == "gpu0" and first.exclusive
    assert choice.reason == "goes alone: it was lost with a worker"
    assert assigned(routing, 0.9) == []           # no second beside it, though it is nearly done
    end(routing, "gpu0", 1.1)
    assert assigned(routing, 1.1) == ["gpu0"]


def test_gpu_only_lets_a_lost_job_wait_for_a_gpu():
    routing = router("gpu-only", gpu0=1.0, cpu0=1.0)
    first, = come(routing, 1)
    assigned(routing)
    come(routing, 1)
    routing.ended(first, 0.5)
    routing.submit_again(first, exclusive=True)
    assert assigned(routing, 0.5) == ["gpu0"] and assigned(routing, 0.9) == []


# --- the others

def test_least_loaded_takes_the_least_in_flight_then_the_faster():
    routing = router("least-loaded", "patch", ahead_s=math.inf, gpu0=0.1, cpu0=1.0)
    come(routing, 1, patches=900)
    come(routing, 3, patches=500)
    assert assigned(routing) == ["gpu0", "cpu0", "cpu0", "gpu0"]       # 900, 500; then 500 < 900, 900 < 1000


def test_round_robin_takes_turns_and_keeps_a_turn_while_waiting():
    routing = router("round-robin", cpu0=1.0, cpu1=2.0, gpu0=0.1)
    come(routing, 6)
    assert assigned(routing) == ["cpu0", "cpu1", "gpu0"]
    end(routing, "gpu0", 0.1)
    assert assigned(routing, 0.1) == []           # the GPU is idle, but it is the turn of cpu0
    assert assigned(routing, 0.75) == ["cpu0"]
    end(routing, "cpu0", 1.0)
    assert assigned(routing, 1.0) == [] and assigned(routing, 1.75) == ["cpu1", "gpu0"]


def test_gpu_only_never_uses_a_cpu_while_there_is_a_gpu():
    routing = router("gpu-only", gpu0=1.0, cpu0=0.1)
    come(routing, 3)
    assert assigned(routing) == ["gpu0"]
    alone = router("gpu-only", cpu0=1.0, cpu1=1.0)
    come(alone, 3)
    assert assigned(alone) == ["cpu0", "cpu1"]
    assert alone.replicas.by_name["cpu0"].held


# --- order, and the numbers that follow the traffic

def test_with_slack_a_small_request_goes_before_a_large_one_that_came_a_little_earlier():
    # The fleet does a typical image of 1000 patches in 0.1 s: 10,000 patches a second.
    routing = router("gpu-only", slack=1.0, gpu0=0.1)
    large, = come(routing, 1, patches=1000, request_patches=8000)     # due at 0.8
    small, = come(routing, 1, now=0.69, patches=1000)                 # due at 0.79
    late, = come(routing, 1, now=0.71, patches=1000)                  # due at 0.81
    assert [large.due, small.due, late.due] == pytest.approx([0.8, 0.79, 0.81])
    assert list(routing.queue) == [small, large, late]


def test_first_come_first_served_without_slack():
    routing = router("gpu-only", gpu0=0.1)
    large, = come(routing, 1, patches=1000, request_patches=8000)
    small, = come(routing, 1, now=0.01, patches=10)
    assert list(routing.queue) == [large, small]


def test_withdrawing_leaves_nothing():
    routing = router("budget", "request", gpu0=1.0)
    jobs = come(routing, 3, images=3)
    assert all(map(routing.withdraw, jobs)) and routing.waiting == 0.0
    assert not routing.withdraw(jobs[0]) and routing.assign(0.0) is None
    come(routing, 2)
    assert len(routing.take_all()) == 2 and routing.waiting == 0.0 and routing.wake_at(0.0) is None


def test_measured_ratio_is_that_of_the_pools_mean_rates():
    routing = router("budget", ratio=0.0, gpu0=0.1, cpu0=1.0, cpu1=2.0)
    assert routing.ratio_measured() == pytest.approx(10 / ((1 + 0.5) / 2))
    assert router("budget", gpu0=0.1).ratio_measured() is None and router("budget", ratio=0.0, gpu0=1).ratio() == 1.0
    assert router("budget", ratio=7.0, gpu0=0.1, cpu0=1.0).ratio() == 7.0


def test_measured_ratio_follows_a_throttled_cpu_and_forgets_it():
    routing = router("budget", ratio=0.0, gpu0=0.1, cpu0=1.0)
    come(routing, 1)
    for now in (1.0, 2.0, 3.0):
        routing.replicas.by_name["cpu0"].model.observe(PATCHES, 3.0, now)
    come(routing, 1, now=4.0 + FORGET_EVERY_S)
    assert routing.ratio_measured() == pytest.approx(30.0)
    come(routing, 1, now=4.0 + OBSERVATION_S + FORGET_EVERY_S)
    assert routing.ratio_measured() == pytest.approx(10.0)


def test_typical_size_follows_the_traffic():
    routing = Router("budget", ratio=0.0, typical_patches=PATCHES)
    # Fixed cost on the GPU, so R depends on the size: 10 for a typical image, 2 for one of a tenth.
    routing.replicas.set_replica("gpu0", "gpu", TimeModel([(100, 0.05), (1000, 0.1)]), True, 0.0)
    routing.replicas.set_replica("cpu0", "cpu", model(1.0), True, 0.0)
    assert routing.ratio_measured() == pytest.approx(10.0)
    for _ in range(400):
        routing.submit(job(100), 0.0)
    assert routing.replicas.typical_patches == pytest.approx(100, rel=TYPICAL_CHANGE - 1)
    assert routing.ratio_measured() == pytest.approx(2.0, rel=TYPICAL_CHANGE - 1)


def test_what_a_worker_gave_back_goes_to_another_one_if_there_is_one():
    router = Router("earliest")
    for name, seconds in (("cpu0", 0.1), ("cpu1", 0.5)):
        router.replicas.set_replica(name, "cpu", TimeModel([(100, seconds)]), True, 0.0)
    job = Job("r", 100)
    router.submit(job, 0.0)
    assert router.assign(0.0).replica.name == "cpu0"
    router.ended(job, 0.0)
    router.submit_again(job, exclusive=True)
    assert router.assign(0.0).replica.name == "cpu1"
    router.ended(job, 0.0)
    router.submit_again(job, exclusive=True)
    router.replicas.set_replica("cpu0", "cpu", router.replicas.by_name["cpu0"].model, False, 0.0)
    assert router.assign(0.0).replica.name == "cpu1"       # there is no other
