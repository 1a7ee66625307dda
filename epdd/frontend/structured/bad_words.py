"""Banned words, as the tokens that spell them.

As in vLLM a word is banned with and without a space before it, and as whole tokens: if `red` is banned, `redness` is
still possible.  Unlike vLLM, every way to cut the word into tokens is banned, not only the tokenizer's own: a model
that may not write `red` finds `r` and `ed`.
"""

from __future__ import annotations

from functools import lru_cache

from epdd.errors import BadRequest
from epdd.families.vocabulary import Vocabulary

STEPS_MAX = 20_000          # 0.3 MB in the message to a worker
_TOKEN_BYTES_MAX = 64       # longer tokens are runs of blanks or punctuation
_KEPT = 8                   # lists of words: clients send the same one with each request


@lru_cache(_KEPT)
def steps(words: tuple[str, ...], vocabulary: Vocabulary) -> tuple[tuple[int, int, int], ...]:
    """For `Sampling.bad_words`.  Raises BadRequest if there are too many."""
    found: list[tuple[int, int, int]] = []
    state = 0       # the last one in use
    for spelling in dict.fromkeys(spelling for word in words for spelling in _spellings(word)):
        data = spelling.encode()
        states = {0: 0}     # bytes of the spelling so far -> state
        for start in range(len(data)):
            if start not in states:
                continue
            for end in range(start + 1, min(len(data), start + _TOKEN_BYTES_MAX) + 1):
                token = vocabulary.token(data[start:end])
                if token is None:
                    continue
                if end == len(data):
                    found.append((states[start], token, 0))
                    continue
                if end not in states:
                    state += 1
                    states[end] = state
                found.append((states[start], token, states[end]))
        if len(found) > STEPS_MAX:
            raise BadRequest("bad_words can be spelt in too many ways; send fewer or shorter ones", param="bad_words")
    return tuple(found)


def _spellings(word: str) -> tuple[str, ...]:
    bare = word.lstrip()
    return (word, bare, f" {bare}") if bare else (word,)
