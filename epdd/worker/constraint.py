"""Answers kept to a grammar: which tokens may come next, and when the answer is complete."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import torch
from tokenizers import Tokenizer, normalizers

from epdd import grammar
from epdd.errors import BadRequest, WorkerFailed
from epdd.families.vocabulary import Vocabulary


class Constraint:
    """One answer's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int, avoid: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._avoid = list(avoid)   # legal only where nothing else is

    def legal(self) -> torch.Tensor:
        """The tokens that may come next, bool [vocab], at least one; end tokens where the answer may end.

        Raises BadRequest if the grammar has led to where nothing fits, or is too costly to follow.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        _check(self._matcher)
        mask = np.unpackbits(bits, count=self._vocab, bitorder="little").view(bool)
        if self._avoid:
            fewer = mask.copy()
            fewer[self._avoid] = False
            mask = fewer if fewer.any() else mask
        return torch.from_numpy(mask)

    def accept(self, token: int) -> None:
        """Go on by a legal token that does not end the answer."""
        if not self._matcher.consume_token(token):
            raise WorkerFailed(f"token {token} was chosen, and the grammar does not allow it")

    @property
    def complete(self) -> bool:
        """Nothing may follow but the end."""
        return bool(self._matcher.is_stopped())


class Constraints:
    """Makes constraints over a checkpoint's tokens.  The tokenizer is read for the first one: with 150,000 tokens
    it takes a second and 140 MB, which a worker without such requests never pays."""

    def __init__(self, folder: str, vocab: int, eos_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._vocab = vocab
        self._eos_ids = tuple(token for token in eos_ids if token < vocab)

    def make(self, text: str, ignore_eos: bool) -> Constraint:
        """`ignore_eos`: goes on as long as the grammar lets it.  Raises BadRequest on a bad grammar."""
        matcher = grammar.begin(text, self._tokenizer)
        _check(matcher)
        return Constraint(matcher, self._vocab, self._eos_ids if ignore_eos else ())

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        tokens = llguidance.TokenizerWrapper(_Tokens(self._folder, self._vocab, self._eos_ids))
        return llguidance.LLTokenizer(tokens, n_vocab=self._vocab, eos_token=list(self._eos_ids))


def _check(matcher: llguidance.LLMatcher) -> None:
    if fault := grammar.fault(matcher):
        raise BadRequest(f"response_format or tools: {fault}")


class _Tokens:
    """The checkpoint's tokens as llguidance asks for them.

    It reads tokenizer.json itself too, but then takes every `<name>` for a control token, and Qwen's `<tool_call>`
    is text.
    """

    def __init__(self, folder: str, vocab: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.normalizer = normalizers.Sequence([])   # forced text must keep its very bytes
        self._tokenizer.encode_special_tokens = True
        vocabulary = Vocabulary(self._tokenizer)
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self.tokens = [vocabulary.bytes(token) for token in range(vocab)]
        self.special_token_ids = sorted(vocabulary.special)

    def __call__(self, text: Any) -> list[int]:
        """How the model would write text that the grammar forces.  Raises TypeError for bytes: the library asks."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
