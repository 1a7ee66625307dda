from __future__ import annotations

import math
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd.emulated_time import Clock, EncoderGroup, Formula, PrefillDecodeGroup, Slow, Timeline


def encoders(**fields) -> EncoderGroup:
    return EncoderGroup(**({"kind": "cpu", "count": 1, "seconds": Formula(a=1.0)} | fields))


JOBS = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 3)), min_size=1, max_size=40)     # (pause before, seconds)


@given(JOBS)
def test_services_follow_each_other_exactly(jobs):
    timeline, ready, last = Timeline(encoders(), "x"), 0.0, 0.0
    for pause, seconds in jobs:
        ready += pause
        service = timeline.serve(ready, seconds, done=0.0)
        assert service.start == max(ready, last) and service.end == service.start + seconds and not service.late
        last = service.end


@given(JOBS, st.lists(st.floats(0, 1), min_size=40, max_size=40))
def test_wake_up_latencies_do_not_add_up(jobs, latencies):
    """A series of works ends after the sum of its times, however late the process woke up for each."""
    timeline, total = Timeline(encoders(), "x"), 0.0
    for (_, seconds), latency in zip(jobs, latencies):
        noticed = timeline.end + latency
        service = timeline.serve(0.0, seconds, done=min(noticed, timeline.end + seconds))
        total += seconds
        assert math.isclose(service.end, total) and not service.late


def test_real_work_that_takes_longer_sets_the_pace():
    timeline = Timeline(encoders(), "x")
    assert timeline.serve(0.0, 1.0, done=1.5).late
    assert timeline.end == 1.5 and timeline.serve(0.0, 1.0).end == 2.5


def test_slowdowns_begin_at_their_moment():
    timeline = Timeline(encoders(slow=(Slow(2.0, 3.0), Slow(8.0, 0.5))), "x")
    ends = [timeline.serve(0.0, 1.0).end for _ in range(6)]
    assert ends == [1.0, 2.0, 5.0, 8.0, 8.5, 9.0]


def test_jitter_has_mean_one_and_follows_its_seed():
    def times(seed):
        timeline = Timeline(encoders(jitter=0.5), seed)
        return [timeline.serve(1e9 * i, 1.0).end - 1e9 * i for i in range(4000)]

    assert times("a") == times("a") != times("b")
    assert 0.95 < sum(times("a")) / 4000 < 1.05 and min(times("a")) < 0.5


def test_formula_and_samples():
    formula = encoders(seconds=Formula(0.5, 0.01, 1e-4))
    assert formula.image_seconds(100) == 0.5 + 1.0 + 1.0
    assert formula.samples(1000) == tuple((n, formula.image_seconds(n)) for n in (16, 64, 256, 1000))
    samples = encoders(seconds=((100, 1.0), (200, 3.0), (400, 4.0)))
    assert [samples.image_seconds(n) for n in (50, 100, 150, 300, 600)] == [0.5, 1.0, 2.0, 3.5, 5.0]
    assert samples.samples(10) == samples.seconds
    assert encoders(seconds=((100, 1.0),)).image_seconds(300) == 3.0


def test_a_step_is_one_pass_over_the_weights():
    pd = PrefillDecodeGroup(kind="gpu", count=1, prefill_tokens_per_s=1000, decode=Formula(0.1, 0.01), kv_tokens=64,
                            context_max=64)
    assert pd.step_seconds(0, 1) == pytest.approx(0.11) and pd.step_seconds(0, 10) == pytest.approx(0.2)
    assert pd.step_seconds(50, 0) == pytest.approx(0.1) and pd.step_seconds(500, 0) == pytest.approx(0.5)
    assert pd.step_seconds(500, 10) == pytest.approx(0.6)


def test_scaled_clock():
    now = 5.0
    clock = Clock(10.0, lambda: now)
    now = 6.0
    assert clock.now() == 10.0 and clock.real(10.0) == 1.0
    clock.start()
    assert clock.now() == 0.0


def test_groups_survive_the_spawn_message():
    group = encoders(seconds=((1, 1.0),), slow=(Slow(1.0, 2.0),))
    assert pickle.loads(pickle.dumps(group)) == group
    assert msgspec.to_builtins(group)["seconds"] == ((1, 1.0),)
