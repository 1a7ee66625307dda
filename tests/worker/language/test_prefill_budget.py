"""Prompt tokens of a step beside decoding sequences, for engines of known speed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd.worker.language.prefill_budget import LEAST, PrefillBudget


def settled(step_s: float, decode_s: float, token_s: float) -> PrefillBudget:
    beside = PrefillBudget(step_s)
    beside.took(0, 512, 512 * token_s)
    for _ in range(3):
        beside.took(4, 0, decode_s)
    return beside


def test_without_a_limit_or_a_measure_there_is_none() -> None:
    assert PrefillBudget(0.1).tokens is None
    assert settled(0.0, 0.03, 0.002).tokens is None
    beside = PrefillBudget(0.1)
    beside.took(4, 0, 0.03)
    assert beside.tokens is None


def test_a_step_takes_as_long_as_it_may() -> None:
    assert settled(0.1, 0.03, 0.002).tokens == 35           # (0.1 - 0.03) / 0.002
    assert settled(0.1, 0.01, 0.0001).tokens == 900
    assert settled(0.1, 0.3, 0.002).tokens == 150           # decoding alone takes longer: as long again for prompts
    assert settled(0.1, 0.03, 0.1).tokens == LEAST


@given(decode_s=st.floats(1e-3, 1.0), token_s=st.floats(1e-5, 1e-2), was=st.floats(1e-5, 1e-2),
       step_s=st.floats(0.01, 1.0))
def test_it_follows_an_engine_that_is_not_as_it_was(decode_s: float, token_s: float, was: float, step_s: float) -> None:
    """Longer prompts make attention slower, cooler processors make products faster."""
    beside = settled(step_s, decode_s, was)
    for _ in range(150):
        assert beside.tokens is not None and beside.tokens >= LEAST
        beside.took(3, beside.tokens, decode_s + beside.tokens * token_s)
    assert beside.tokens is not None
    seconds = decode_s + beside.tokens * token_s
    assert beside.tokens == LEAST or seconds <= max(step_s, 2 * decode_s) * 1.02
    # And no shorter than it may be, but for the last token.
    assert seconds + token_s >= max(step_s, 2 * decode_s) * 0.98


def test_one_step_that_was_held_up_says_little() -> None:
    beside = settled(0.1, 0.03, 0.002)
    beside.took(4, 35, 10.0)
    assert beside.tokens == pytest.approx(35 / 1.2, abs=1)
    beside = settled(0.1, 0.03, 0.002)
    beside.took(4, 0, 10.0)
    assert beside.tokens == pytest.approx((0.1 - 0.036) / 0.002, abs=1)
