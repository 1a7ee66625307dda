"""The next token of one request, from its logits.

Order: penalties, logit_bias, min_tokens, banned tokens and grammar, then greedy or temperature, top_k, top_p, min_p and
a draw.  Each request draws from its own generator, one number a token, so the rest of the batch cannot change its
tokens.
"""

from __future__ import annotations

import torch

from epdd.errors import BadRequest
from epdd.wire import Sampling, TokenLogprob
from epdd.worker.language.sampling.banned_tokens import Bans
from epdd.worker.language.sampling.structured_output import AfterThinking, GrammarMask

GREEDY_BELOW = 1e-5         # a temperature below this would overflow the division
BAN_BIAS = -100.0           # the OpenAI API promises a ban at this value, whatever the model's logits are
LOGPROB_MIN = -9999.0       # JSON has no -inf
SHORT_LIST = 1024           # tokens among which top_p is nearly always reached; sorting all is 20 times slower


class Sampler:
    """How one request chooses; keeps what its past tokens change."""

    def __init__(self, sampling: Sampling, prompt: list[int], stop_ids: frozenset[int], vocab: int,
                 device: torch.device, grammar: GrammarMask | AfterThinking | None = None) -> None:
        self._s = sampling
        self._grammar = grammar
        self._bans = Bans(sampling, vocab, device) if sampling.allowed_token_ids or sampling.bad_words else None
        self._generated = 0
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed & (1 << 63) - 1)
        self._stop = torch.tensor(sorted(i for i in stop_ids if 0 <= i < vocab), dtype=torch.long, device=device)
        self._greedy = sampling.temperature < GREEDY_BELOW or sampling.top_k == 1
        self._counts = self._seen = None
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = torch.zeros(vocab, device=device)
        if sampling.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab, dtype=torch.bool, device=device)
            self._seen[torch.tensor(prompt, device=device)] = True
        bias = {token: value for token, value in sampling.logit_bias.items() if 0 <= token < vocab}
        self._biased = torch.tensor(list(bias), dtype=torch.long, device=device)
        self._bias = torch.tensor([float("-inf") if value <= BAN_BIAS else value for value in bias.values()],
                                  device=device)

    @property
    def plain(self) -> bool:
        """Whether the token is the largest logit, which the model runner finds for the whole batch."""
        return self._greedy and self._counts is None and self._seen is None and not len(self._biased) \
            and self._grammar is None and self._bans is None and self._generated >= self._s.min_tokens

    @property
    def complete(self) -> bool:
        """Whether the grammar allows nothing more; min_tokens does not matter then."""
        return self._grammar is not None and self._grammar.complete

    def choose(self, logits: torch.Tensor) -> int:
        """The next token from finite float32 logits [vocab].  Raises BadRequest if no token may come next."""
        barred = self._barred(logits.device)
        logits = self._adjusted(logits) if barred is None else self._legal(logits, barred)
        if self._greedy:
            return int(logits.argmax())
        return self._draw(logits / self._s.temperature)

    def logprob(self, logits: torch.Tensor, token: int) -> TokenLogprob | None:
        """The model's own log-probabilities, before penalties and temperature, if they were asked for."""
        if self._s.logprobs < 0:
            return None
        logs = logits.log_softmax(-1).clamp_min(LOGPROB_MIN)
        values, ids = logs.topk(min(self._s.logprobs, len(logs)))
        return TokenLogprob(float(logs[token]), tuple(zip(ids.tolist(), values.tolist())))

    def accept(self, token: int) -> None:
        """Remember a token that joins the answer."""
        self._generated += 1
        if self._grammar is not None:
            self._grammar.accept(token)
        if self._bans is not None:
            self._bans.accept(token)
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True

    def _adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        s = self._s
        logits = logits.clone()
        if self._seen is not None:
            stronger = torch.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
            logits = torch.where(self._seen, stronger, logits)
        if self._counts is not None:
            logits -= s.frequency_penalty * self._counts + s.presence_penalty * (self._counts > 0)
        logits[self._biased] += self._bias
        if self._generated < s.min_tokens:
            logits[self._stop] = float("-inf")
        return logits

    def _barred(self, device: torch.device) -> torch.Tensor | None:
        """Tokens that must not come next whatever the logits are, bool [vocab]; None: there are none."""
        banned = None if self._bans is None else self._bans.now()
        if self._grammar is None:
            return banned
        illegal = ~self._grammar.legal().to(device)
        return illegal if banned is None else illegal | banned

    def _legal(self, logits: torch.Tensor, barred: torch.Tensor) -> torch.Tensor:
        adjusted = self._adjusted(logits).masked_fill_(barred, float("-inf"))
        if adjusted.max() > float("-inf"):
            return adjusted
        # Where bias or min_tokens ban all that is left, they give way.
        left = logits.masked_fill(barred, float("-inf"))
        if self._bans is not None and left.max() == float("-inf"):
            raise BadRequest("bad_words, allowed_token_ids and the form of the answer together leave no token that "
                             "could come next")
        return left

    def _draw(self, scaled: torch.Tensor) -> int:
        values, ids = self._candidates(scaled)
        odds = (values - values.max()).double().exp()
        if self._s.min_p > 0:
            odds[odds < min(1.0, self._s.min_p)] = 0    # the largest is 1
        total = odds.cumsum(0)
        point = torch.rand((), generator=self._generator, dtype=torch.float64).to(total.device) * total[-1]
        place = int(torch.searchsorted(total, point, right=True).clamp_(max=len(total) - 1))
        return int(ids[place]) if ids is not None else place

    def _candidates(self, scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values and ids after top_k and top_p; ids None: all, in order."""
        s = self._s
        ids: torch.Tensor | None = None
        if 0 < s.top_k < len(scaled):
            scaled, ids = scaled.topk(s.top_k)
        if s.top_p >= 1:
            return scaled, ids
        whole = scaled.double().logsumexp(0)
        for length in (min(SHORT_LIST, len(scaled)), len(scaled)):
            values, order = scaled.topk(length)
            reached = (values.double() - whole).exp().cumsum(0)
            if reached[-1] >= s.top_p:
                break
        # Kept: the shortest head of the list whose sum reaches top_p, at least one token.
        keep = min(int((reached < s.top_p).sum()) + 1, len(values))
        return values[:keep], order[:keep] if ids is None else ids[order[:keep]]
