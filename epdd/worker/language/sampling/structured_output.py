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
from epdd.wire import Sampling


class GrammarMask:
    """One answer's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int, avoid: tuple[int, ...]) -> None:
        self._matcher = matcher
        self.vocab = vocab
        self._avoid = list(avoid)   # legal only where nothing else is

    def legal(self) -> torch.Tensor:
        """The tokens that may come next, bool [vocab], at least one; end tokens where the answer may end.

        Raises BadRequest if the grammar has led to where nothing fits, or is too costly to follow.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        _check(self._matcher)
        mask = np.unpackbits(bits, count=self.vocab, bitorder="little").view(bool)
        if self._avoid:
            fewer = mask.copy()
            fewer[self._avoid] = False
            mask = fewer if fewer.any() else mask
        return torch.from_numpy(mask)

    def accept(self, token: int) -> None:
        """Go on by a legal token that does not end the answer."""
        if not self._matcher.consume_token(token):
            raise WorkerFailed(f"token {token} was chosen, and the grammar does not allow it")

    def allows(self, token: int) -> bool:
        """Whether the grammar itself can go on by this token."""
        return bool(self._matcher.validate_tokens([token]))

    @property
    def complete(self) -> bool:
        """Nothing may follow but the end."""
        return bool(self._matcher.is_stopped())


class AfterThinking:
    """A grammar that begins after the answer's thinking, which is free but for one thing: it cannot end the answer."""

    def __init__(self, grammar_mask: GrammarMask, start_id: int, end_id: int, ends: tuple[int, ...],
                 breaks: frozenset[int]) -> None:
        """`start_id`: the token that begins the thinking if it is the answer's first; -1: it has begun.

        `ends` are the tokens that end an answer, `breaks` those of line breaks alone: models write one between their
        thinking and the answer.
        """
        self._grammar = grammar_mask
        self._start_id = start_id
        self._end_id = end_id
        self._ends = list(ends)
        self._breaks = breaks
        self._thinking = start_id < 0
        self._also = [] if self._thinking else [start_id]   # legal next, besides what the grammar allows

    def legal(self) -> torch.Tensor:
        """As `GrammarMask.legal`."""
        if self._thinking:
            mask = torch.ones(self._grammar.vocab, dtype=torch.bool)
            mask[self._ends] = False
        else:
            mask = self._grammar.legal()
            mask[self._also] = True
        return mask

    def accept(self, token: int) -> None:
        """As `GrammarMask.accept`."""
        also, self._also = self._also, []
        if self._thinking:
            if token == self._end_id:
                self._thinking, self._also = False, sorted(self._breaks)
        elif token == self._start_id and also:
            self._thinking = True
        elif not (token in also and not self._grammar.allows(token)):
            self._grammar.accept(token)

    @property
    def complete(self) -> bool:
        """As `GrammarMask.complete`."""
        return not self._thinking and self._grammar.complete


class GrammarCompiler:
    """Makes grammar masks over a checkpoint's tokens.  The tokenizer is read for the first one: with 150,000 tokens it
    takes a second and 140 MB, which a worker without such requests never needs."""

    def __init__(self, folder: str, vocab: int, eos_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._vocab = vocab
        self._eos_ids = tuple(token for token in eos_ids if token < vocab)

    def compile(self, sampling: Sampling) -> GrammarMask | AfterThinking:
        """For a request's grammar; with ignore_eos it goes on until the grammar allows nothing else.

        Raises BadRequest on a bad grammar.
        """
        tokenizer, breaks = self._tokenizer
        matcher = grammar.begin(sampling.grammar, tokenizer)
        _check(matcher)
        mask = GrammarMask(matcher, self._vocab, self._eos_ids if sampling.ignore_eos else ())
        if sampling.think_end_id < 0:
            return mask
        return AfterThinking(mask, sampling.think_start_id, sampling.think_end_id, self._eos_ids, breaks)

    @cached_property
    def _tokenizer(self) -> tuple[llguidance.LLTokenizer, frozenset[int]]:
        """The checkpoint's tokens, and which of them are line breaks alone."""
        tokens = _Tokens(self._folder, self._vocab, self._eos_ids)
        breaks = frozenset(token for token, text in enumerate(tokens.tokens) if text and not text.strip(b"\n"))
        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(tokens), n_vocab=self._vocab,
                                           eos_token=list(self._eos_ids))
        return tokenizer, breaks


def _check(matcher: llguidance.LLMatcher) -> None:
    if fault := grammar.fault(matcher):
        raise BadRequest(f"The grammar that this answer must follow: {fault}")


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
