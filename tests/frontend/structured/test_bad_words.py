"""Words as tokens: every way to cut them, and no other tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epdd.errors import BadRequest
from epdd.families.vocabulary import Vocabulary
from epdd.frontend.structured import bad_words
from epdd.wire import Sampling

from tests.frontend.conftest import build_tokenizer

VOCABULARY = Vocabulary(build_tokenizer())
SIZE = 420
TEXTS = [VOCABULARY.bytes(token) for token in range(SIZE)]


def banned(words: list[str], said: list[int]) -> set[int]:
    """The tokens that the automaton bans after these tokens, by the rule of `Sampling`."""
    steps = Sampling(max_tokens=1, bad_words=bad_words.steps(tuple(words), VOCABULARY)).bad_words
    states = {0}
    for token in said:
        states = {0} | {to for state, step, to in steps if state in states and step == token and to}
    return {step for state, step, to in steps if state in states and not to}


def cuts(data: bytes) -> set[tuple[int, ...]]:
    """Every run of tokens that spells these bytes."""
    if not data:
        return {()}
    return {(token, *rest) for token, text in enumerate(TEXTS) if text and data.startswith(text)
            for rest in cuts(data[len(text):])}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["red", " red", "café", "two", "🫠", "squ", "\n", "a"]),
       st.lists(st.integers(0, SIZE - 1), max_size=3))
def test_the_last_token_of_each_spelling_is_banned(word: str, before: list[int]) -> None:
    spellings = {word, word.lstrip() or word, f" {word.lstrip()}" if word.strip() else word}
    for way in set().union(*(cuts(spelling.encode()) for spelling in spellings)):
        assert way[-1] in banned([word], [*before, *way[:-1]])
    # Nothing is banned if none of them has begun.
    apart = {way[0] for spelling in spellings for way in cuts(spelling.encode()) if len(way) == 1}
    assert banned([word], [VOCABULARY.token(b"9") or 0]) == apart


def test_words_do_not_disturb_each_other() -> None:
    one, two = banned(["red"], []), banned(["blue", "two"], [])
    assert banned(["blue", "red", "two", "red"], []) == one | two


def test_too_many_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("the image shows a red circle left of two blue squares",)
    assert len(bad_words.steps(words, VOCABULARY)) > 100
    monkeypatch.setattr(bad_words, "STEPS_MAX", 100)
    with pytest.raises(BadRequest, match="bad_words"):
        bad_words.steps((*words, "more"), VOCABULARY)
