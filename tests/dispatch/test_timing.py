"""Time models against curves they must recover, and against what a bad clock may feed them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd.dispatch.timing import TimeModel, capability_ratio, fit


def curve(a, b, c, patches=(64, 256, 784, 2048, 8160)):
    return [(p, a + b * p + c * p * p) for p in patches]


@pytest.mark.parametrize("a, b, c", [(0.01, 1e-3, 1e-7), (0.0, 2e-3, 0.0), (0.5, 1e-4, 5e-8)])
def test_recovers_an_exact_curve(a, b, c):
    assert fit(curve(a, b, c)) == pytest.approx((a, b, c), rel=1e-4, abs=1e-9)


def test_two_points_give_a_line_one_a_proportion_none_a_default():
    assert fit([(100, 0.2), (200, 0.3)])[1] == pytest.approx(0.001, abs=1e-3)
    assert fit([(100, 0.2)]) == pytest.approx((0.0, 0.002, 0.0))
    assert TimeModel().predict(1000) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(1, 20000), st.floats(1e-5, 1e3)), max_size=8))
def test_never_negative_and_never_falling(samples):
    model = TimeModel(samples)
    times = [model.predict(p) for p in (1, 10, 100, 1000, 10000)]
    assert times[0] >= 0 and all(a <= b for a, b in zip(times, times[1:]))


def test_correction_follows_a_lasting_change_and_shrugs_off_one_outlier():
    model = TimeModel(curve(0.0, 1e-3, 0.0))
    model.observe(1000, 60.0)                       # one swap storm
    assert model.predict(1000) < 1.4
    for _ in range(60):
        model.observe(1000, 2.0)                    # half of the CPU was taken away
    assert model.predict(1000) == pytest.approx(2.0, rel=0.02)
    for _ in range(60):
        model.observe(1000, 1.0)
    assert model.predict(1000) == pytest.approx(1.0, rel=0.02)


def test_ratio_is_cpu_seconds_over_gpu_seconds():
    gpu, cpu = TimeModel(curve(0, 1e-4, 0)), TimeModel(curve(0, 1.2e-3, 0))
    assert capability_ratio([gpu], [cpu, cpu], 784) == pytest.approx(12.0)
    assert capability_ratio([], [cpu], 784) is None
