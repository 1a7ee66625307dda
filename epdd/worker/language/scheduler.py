"""Which sequences run in the next step: a pure state machine over token counts, without torch.

KV memory is counted in tokens, and only here.  A sequence is admitted with room for its prompt and HEADROOM_TOKENS of
its answer, and grows later.  If no memory is left, the youngest is preempted: it gives its KV memory back, waits in
front of all others and is computed anew, with its answer so far as a part of its prompt.

The waiting sequence whose tenant has the fewest running is admitted next; first come, first served if they are equal.
No tenant starves: once its running sequences have ended, only older ones can be before its oldest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from epdd.errors import ContextLength

BLOCK_SIZE = 64         # tokens: KV memory is reserved in blocks
HEADROOM_TOKENS = 512   # of an answer reserved ahead: fewer growths, and most answers never need one


@dataclass(eq=False)
class Sequence:
    """What the scheduler knows of a request."""

    id: str
    tokens: list[int]           # the prompt, then the answer so far
    prompt: int                 # how many of them are the prompt
    total_max: int              # prompt and the longest answer
    computed: int = 0           # tokens whose keys and values are in the cache
    reserved: int = 0           # tokens of KV memory
    pinned: bool = False        # cannot be computed anew, so never preempted
    tenant: str = ""            # tenants share the places fairly
    # Equal for equal prompts: one is computed, the others then find it in the prefix cache.  None: no other is equal.
    shared_prefill: int | None = None

    @property
    def pending(self) -> int:
        """Tokens not computed yet: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def complete(self) -> bool:
        """Whether its memory suffices to its last token, so that it can never cause a preemption."""
        return self.reserved >= self.total_max


S = TypeVar("S", bound=Sequence)


@dataclass
class Batch(Generic[S]):
    """One step: `count` tokens from `computed` on of each sequence, decoding ones first."""

    chunks: list[tuple[S, int]] = field(default_factory=list)
    preempted: list[S] = field(default_factory=list)    # their memory goes back before the step runs


class Scheduler(Generic[S]):
    """Waiting and running sequences, each tenant's oldest first, with two exceptions: a pinned one may run on while an
    older one waits, and one that waits for a shared prefill lets younger ones go ahead."""

    def __init__(self, kv_tokens: int, max_batched_tokens: int, max_sequences: int, headroom: int = HEADROOM_TOKENS,
                 begin: Callable[[S], int] = lambda sequence: 0) -> None:
        """`begin(sequence)` places an admitted sequence in memory, and returns how many tokens are computed already."""
        self.capacity = kv_tokens // BLOCK_SIZE * BLOCK_SIZE
        self.free = self.capacity
        self.waiting: deque[S] = deque()
        self.running: list[S] = []
        self.preempted = 0
        self.max_batched_tokens = max_batched_tokens
        # Each running sequence gets at least one token a step, or it would keep memory for nothing.
        self._max_sequences = min(max_sequences, max_batched_tokens)
        self._headroom = headroom
        self._begin = begin

    def add(self, sequence: S) -> None:
        """Queue a sequence.  Raises ContextLength if it could not finish even alone."""
        if sequence.total_max > self.capacity:
            raise ContextLength(f"prompt and answer of {sequence.total_max} tokens do not fit the {self.capacity} "
                                "tokens of KV cache")
        self.waiting.append(sequence)

    def remove(self, sequence: S) -> None:
        """Forget a sequence that is done or cancelled."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def next_batch(self, prefill_max: int | None = None) -> Batch[S]:
        """Decoding sequences first, then prefill chunks, then new sequences, within the token budget.

        `prefill_max`: most prompt tokens of a step in which a sequence decodes; None: no limit of its own.
        """
        batch: Batch[S] = Batch()
        left = self.max_batched_tokens
        for sequence in [s for s in self.running if s.pending == 1]:
            if sequence.reserved and self._grow(sequence, batch):
                batch.chunks.append((sequence, 1))
                left -= 1
        if batch.chunks and prefill_max is not None:
            left = min(left, prefill_max)
        for sequence in self.running:
            if left and sequence.pending > 1:
                left -= self._prefill(sequence, left, batch)
        # After a preemption the freed memory is for the sequences that needed it, not for the next in line.
        while left and not batch.preempted and (first := self._next()) and self._admit(first):
            left -= self._prefill(first, left, batch)
        return batch

    def _next(self) -> S | None:
        """The first of the tenant with the fewest running, without those that wait for a shared prefill."""
        computing = {s.shared_prefill for s in self.running if len(s.tokens) == s.prompt} - {None}
        running = Counter(s.tenant for s in self.running)
        free = (s for s in self.waiting if s.shared_prefill not in computing)
        return min(free, key=lambda s: running[s.tenant], default=None)

    def _prefill(self, sequence: S, left: int, batch: Batch[S]) -> int:
        count = min(left, sequence.pending)
        batch.chunks.append((sequence, count))
        return count

    def _admit(self, sequence: S) -> bool:
        if len(self.running) >= self._max_sequences or not self._reserve(sequence, self._ahead(sequence)):
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.computed = self._begin(sequence)
        return True

    def _grow(self, sequence: S, batch: Batch[S]) -> bool:
        """Room for one more token, by preemption if needed; False if the sequence itself was preempted."""
        if len(sequence.tokens) <= sequence.reserved:
            return True
        while not (self._reserve(sequence, self._ahead(sequence)) or self._reserve(sequence, len(sequence.tokens))):
            # There is always one: a pinned sequence never grows, so this one is not pinned.
            victim = next(s for s in reversed(self.running) if not s.pinned)
            self._preempt(victim, batch)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: S, batch: Batch[S]) -> None:
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        self._release(victim)
        victim.computed = 0
        self.preempted += 1
        batch.preempted.append(victim)

    def _ahead(self, sequence: S) -> int:
        return min(sequence.total_max, len(sequence.tokens) + self._headroom)

    def _reserve(self, sequence: S, tokens: int) -> bool:
        more = -(-tokens // BLOCK_SIZE) * BLOCK_SIZE - sequence.reserved
        if more > self.free:
            return False
        self.free -= more
        sequence.reserved += more
        return True

    def _release(self, sequence: S) -> None:
        self.free += sequence.reserved
        sequence.reserved = 0
