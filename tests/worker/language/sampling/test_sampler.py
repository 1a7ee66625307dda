from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from epdd.errors import BadRequest
from epdd.wire import Sampling
from epdd.worker.language.sampling.sampler import Sampler

VOCAB = 50
LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB).map(torch.tensor)


def sampler(prompt: list[int] | None = None, stop: frozenset[int] = frozenset(), **options: Any) -> Sampler:
    return Sampler(Sampling(**({"max_tokens": 99} | options)), prompt or [1, 2, 3], stop, VOCAB, torch.device("cpu"))


def drawn(chooser: Sampler, logits: torch.Tensor, n: int) -> list[int]:
    tokens = []
    for _ in range(n):
        tokens.append(chooser.choose(logits))
        chooser.accept(tokens[-1])
    return tokens


@settings(deadline=None)
@given(logits=LOGITS, seed=st.integers(-2**63, 2**64))
def test_one_candidate_is_greedy(logits: torch.Tensor, seed: int) -> None:
    best = logits.max()
    for options in ({"top_k": 1}, {"temperature": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}):
        # Logits closer than float32's resolution have one probability: each of them is the best.
        assert logits[sampler(seed=seed, **options).choose(logits)] >= best - 1e-5


@settings(deadline=None)
@given(logits=LOGITS, seed=st.integers(0, 1000))
def test_seed_decides(logits: torch.Tensor, seed: int) -> None:
    first = drawn(sampler(seed=seed), logits, 20)
    torch.rand(7)       # the global generator must not matter
    assert drawn(sampler(seed=seed), logits, 20) == first


def test_no_seed_is_a_fresh_one() -> None:
    flat = torch.zeros(VOCAB)
    assert drawn(sampler(), flat, 30) != drawn(sampler(), flat, 30)


@settings(deadline=None)
@given(logits=LOGITS, seed=st.integers(0, 1000), k=st.integers(2, 10))
def test_top_k_and_top_p_bound_the_candidates(logits: torch.Tensor, seed: int, k: int) -> None:
    order = logits.sort(descending=True)
    assert all(logits[t] >= order.values[k - 1] for t in drawn(sampler(seed=seed, top_k=k), logits, 20))
    sums = order.values.double().softmax(0).cumsum(0)
    for p in (0.3, 0.9):
        needed = int((sums < p - 1e-6).sum()) + 1
        assert all(logits[t] >= order.values[min(needed, VOCAB - 1)]
                   for t in drawn(sampler(seed=seed, top_p=p), logits, 20))


def test_min_p_bounds_the_candidates_by_the_best_one() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1] + [0.0] * 47).log()
    assert set(drawn(sampler(seed=1, min_p=0.4), logits, 300)) == {0, 1}


def test_draws_follow_the_distribution() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[[3, 30, 40]] = torch.tensor([0.5, 0.3, 0.2]).log()
    tokens = drawn(sampler(seed=0), logits, 4000)
    for token, share in ((3, 0.5), (30, 0.3), (40, 0.2)):
        assert tokens.count(token) / 4000 == pytest.approx(share, abs=0.03)
    sharper = drawn(sampler(seed=0, temperature=0.5), logits, 4000)
    assert sharper.count(3) / 4000 == pytest.approx(0.25 / 0.38, abs=0.03)


@settings(deadline=None)
@given(logits=LOGITS, banned=st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB - 1))
def test_a_bias_of_minus_100_bans(logits: torch.Tensor, banned: set[int]) -> None:
    bias = {token: -100.0 for token in banned}
    for temperature in (0.0, 2.0):
        assert not banned & set(drawn(sampler(seed=0, temperature=temperature, logit_bias=bias), logits * 50, 10))


def test_bias_moves_a_logit_by_its_value() -> None:
    logits = torch.zeros(VOCAB)
    logits[7] = 3.0
    assert sampler(temperature=0.0, logit_bias={9: 2.9}).choose(logits) == 7
    assert sampler(temperature=0.0, logit_bias={9: 3.1, 4711: 50.0}).choose(logits) == 9


def test_penalties_follow_their_formulas() -> None:
    logits = torch.linspace(-5, 5, VOCAB)
    chooser = sampler([4, 45], temperature=0.0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    for token in (49, 49, 10):
        chooser.accept(token)
    wanted = logits.clone()
    for token in (4, 45, 49, 10):       # repetition counts the prompt too
        wanted[token] = wanted[token] / 2 if wanted[token] > 0 else wanted[token] * 2
    wanted[49] -= 0.25 + 2 * 0.5        # presence and frequency count the answer only
    wanted[10] -= 0.25 + 0.5
    torch.testing.assert_close(chooser._adjusted(logits), wanted)
    assert torch.equal(logits, torch.linspace(-5, 5, VOCAB))


def test_min_tokens_holds_the_stop_tokens_back() -> None:
    logits = torch.zeros(VOCAB)
    logits[5], logits[6], logits[7] = 9.0, 8.0, 7.0
    chooser = sampler(stop=frozenset({5, 6, 900}), temperature=0.0, min_tokens=2)
    assert not chooser.plain
    assert drawn(chooser, logits, 3) == [7, 7, 5]
    assert chooser.plain


def test_logprobs_are_the_models_own_and_json_safe() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[[3, 4]] = torch.tensor([0.75, 0.25]).log()
    assert sampler().logprob(logits, 3) is None
    none = sampler(logprobs=0, temperature=0.1).logprob(logits, 3)
    assert none is not None and none.logprob == pytest.approx(math.log(0.75)) and none.top == ()
    some = sampler(logprobs=3).logprob(logits, 9)
    assert some is not None and some.logprob == -9999.0
    assert [token for token, _ in some.top[:2]] == [3, 4] and some.top[2][1] == -9999.0


def test_only_allowed_tokens() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)
    chooser = sampler(temperature=0.0, allowed_token_ids=(7, 3, 900))
    assert not chooser.plain and drawn(chooser, logits, 3) == [7, 7, 7]
    assert set(drawn(sampler(seed=1, temperature=2.0, allowed_token_ids=(7, 3)), logits * 0, 200)) == {3, 7}
    # The end token is an ordinary one; if min_tokens bans all allowed tokens, min_tokens does not apply.
    alone = sampler(stop=frozenset({7}), temperature=0.0, allowed_token_ids=(7,), min_tokens=2)
    assert drawn(alone, logits, 2) == [7, 7]


def test_bad_words_by_every_way_to_spell_them() -> None:
    """The word 1 2 3, or as two tokens 1 23: its last token is banned behind the others, and only there."""
    word = ((0, 1, 1), (1, 2, 2), (2, 3, 0), (1, 23, 0), (0, 40, 0))
    logits = torch.zeros(VOCAB)
    logits[[40, 3, 23, 2, 1, 9]] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.0])
    chooser = sampler(temperature=0.0, bad_words=word)
    assert not chooser.plain and chooser.choose(logits) == 3      # 40 is a word by itself
    for said, best in ((1, 3), (2, 23), (1, 3), (1, 3), (9, 3)):
        chooser.accept(said)
        assert chooser.choose(logits) == best, said


def test_nothing_left_is_said() -> None:
    chooser = sampler(temperature=0.0, allowed_token_ids=(5,), bad_words=((0, 5, 0),))
    with pytest.raises(BadRequest, match="bad_words"):
        chooser.choose(torch.zeros(VOCAB))
