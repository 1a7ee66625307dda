"""Time models recover given curves, and survive wrong measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd.dispatch.routing.time_models import OBSERVATIONS_MAX, OBSERVATION_S, SLOW_AFTER_S, TimeModel, fit


def curve(a, b, c, patches=(64, 256, 784, 2048, 8160)):
    return [(p, a + b * p + c * p * p) for p in patches]


@pytest.mark.parametrize("a, b, c", [(0.01, 1e-3, 1e-7), (0.0, 2e-3, 0.0), (0.5, 1e-4, 5e-8), (0.11, 0.0, 0.0)])
def test_recovers_an_exact_curve(a, b, c):
    assert fit(curve(a, b, c)) == pytest.approx((a, b, c), rel=1e-4, abs=1e-9)


def test_two_points_give_a_line_one_a_proportion_none_a_default():
    assert fit([(100, 0.2), (200, 0.3)]) == pytest.approx((0.1, 0.001, 0.0), abs=1e-6)
    assert fit([(100, 0.2)]) == pytest.approx((0.0, 0.002, 0.0))
    assert TimeModel().predict(1000) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(1, 20000), st.floats(1e-5, 1e3)), max_size=8))
def test_never_negative_and_never_falling(samples):
    model = TimeModel(samples)
    times = [model.predict(p) for p in (1, 10, 100, 1000, 10000)]
    assert times[0] >= 0 and all(a <= b for a, b in zip(times, times[1:]))


def heard(*ratios, model=None, now=0.0):
    """A model of 1 ms a patch that heard images take so many times as long, one a second."""
    model = model or TimeModel(curve(0.0, 1e-3, 0.0))
    for i, ratio in enumerate(ratios):
        model.observe(1000, ratio, now + i)
    return model


@pytest.mark.parametrize("ratios, correction", [
    ((), 1.0),
    ((5.0,), 1.0),                              # 1, 1 and 5: two more are asked for before one is believed
    ((5.0, 2.0), 2.0),                          # 1, 2, 5
    ((2.0, 3.0, 4.0), 3.0),
    ((2.0, 3.0, 4.0, 5.0), 3.5),                # of an even number the middle two's mean
    ((1.0, 60.0, 1.0, 60.0, 1.0), 1.0),         # two swap storms among five change nothing
    ((9.0, 9.0, 9.0) + (2.0,) * (OBSERVATIONS_MAX // 2 + 1), 2.0),      # older ones are not counted
])
def test_correction_is_the_median_of_the_last(ratios, correction):
    model = heard(*ratios)
    assert model.correction == pytest.approx(correction)
    assert model.predict(2000) == pytest.approx(2.0 * correction)


def test_what_was_heard_too_long_ago_is_forgotten():
    model = heard(2.0, 2.0, 2.0)                # at 0, 1 and 2 s
    model.forget(OBSERVATION_S)
    assert model.correction == 2.0              # the first is exactly OBSERVATION_S old
    model.forget(OBSERVATION_S + 0.5)
    assert model.correction == 2.0              # 1, 2, 2
    model.forget(OBSERVATION_S + 1.5)
    assert model.correction == 1.0              # 1, 1, 2
    model.forget(OBSERVATION_S + 99)
    assert model.correction == 1.0


def test_slow_for_thirty_seconds_is_called_slow():
    model = heard(2.0, 2.0, 2.0)                # the correction is 2 from the second on, at 1 s
    assert not model.slow(SLOW_AFTER_S + 0.9)
    assert model.slow(SLOW_AFTER_S + 1)
    heard(*[1.0] * 4, model=model, now=40.0)    # back to what it was: slow no more, and counted anew
    assert not model.slow(99)
    heard(*[2.0] * 4, model=model, now=100.0)
    assert not model.slow(120) and model.slow(140)


def test_a_little_slower_is_not_slow():
    assert not heard(*[1.4] * 7).slow(1e6)


def test_a_stopped_clock_gives_numbers_all_the_same():
    model = TimeModel([(100, 0.0)])
    model.observe(0, 0.0, 0.0)
    model.observe(100, 0.0, 0.0)
    assert model.predict(100) >= 0
