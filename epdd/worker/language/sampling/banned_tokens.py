"""Tokens that one answer must not have: those outside allowed_token_ids, and those that would complete a bad word."""

from __future__ import annotations

from collections import defaultdict

import torch

from epdd.wire import Sampling


class Bans:
    """What the answer so far bans next."""

    def __init__(self, sampling: Sampling, vocab: int, device: torch.device) -> None:
        allowed = sampling.allowed_token_ids
        self._always = torch.full((vocab,), bool(allowed), device=device)
        if allowed:
            self._always[torch.tensor([token for token in allowed if token < vocab], dtype=torch.long)] = False
        completing: dict[int, list[int]] = defaultdict(list)
        self._steps: dict[tuple[int, int], list[int]] = defaultdict(list)
        for state, token, following in sampling.bad_words:
            if following:
                self._steps[state, token].append(following)
            elif token < vocab:
                completing[state].append(token)
        self._always[torch.tensor(completing.pop(0, []), dtype=torch.long)] = True     # state 0 is always there
        self._completing = {state: torch.tensor(tokens, device=device) for state, tokens in completing.items()}
        self._states: set[int] = set()

    def now(self) -> torch.Tensor:
        """The tokens that must not come next, bool [vocab], to be read only."""
        ends = [self._completing[state] for state in self._states if state in self._completing]
        if not ends:
            return self._always
        banned = self._always.clone()
        banned[torch.cat(ends)] = True
        return banned

    def accept(self, token: int) -> None:
        """A token joins the answer."""
        self._states = {following for state in (0, *self._states) for following in self._steps.get((state, token), ())}
