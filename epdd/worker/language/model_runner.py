"""What the engine and a model runner see of each other.  No torch: an emulated worker starts without it.

The engine owns requests: which are computed in a step, what becomes of their tokens, how they end.  The runner owns one
device: the weights, what layers remember of sequences, kernels.  There is one for CPUs (`cpu_runner`), one for GPUs
(`worker/gpu/runner`) and one for emulated time (`worker/emulated/runner`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from epdd import wire
from epdd.families import ModelInfo
from epdd.worker.language import scheduler
from epdd.worker.language.scheduler import Batch

if TYPE_CHECKING:
    import torch

    from epdd.worker.language.sampling.sampler import Sampler


class PromptImage(Protocol):
    """An image's embeddings."""

    @property
    def places(self) -> tuple[wire.Run, ...]:
        """(start, count) of the prompt's tokens whose places its rows take, one after another."""

    @property
    def arena(self) -> int | None:
        """The arena that must stay open until all is read; None: no one closes it."""

    def take(self, low: int, high: int) -> torch.Tensor:
        """Its rows [low, high), as [planes, rows, hidden]."""

    def kept(self) -> PromptImage:
        """The same in memory of our own."""

    def wait(self) -> None:
        """Return when no copy from the lease is under way."""


@dataclass(eq=False, kw_only=True)
class PromptSequence(scheduler.Sequence):
    """A request from its message to its last answer.  `ModelRunner.prepare` fills in the second part."""

    message: wire.Generate
    stop_ids: frozenset[int]
    leases_until: int                   # tokens to compute before no lease is read any more
    proven: int = 0                     # tokens in its memory from which finite logits came
    cached: int = 0                     # tokens found at its beginning
    prefilled: bool = False

    sampler: Sampler = field(init=False)
    positions: torch.Tensor | None = None       # [3, prompt]; None: 0, 1, 2...
    delta: int = 0                              # position of an answer's token less its index
    images: list[PromptImage] = field(default_factory=list)
    content: tuple[int, ...] = ()               # what the prompt is to the prefix cache; (): nothing

    @property
    def items(self) -> list[int]:
        """What prompt and answer so far are to the prefix cache."""
        return [*self.content, *self.tokens[self.prompt:]] if self.content else []


@dataclass(frozen=True)
class StepOutput:
    """What a step found for the rows whose next token is wanted, in batch order."""

    logits: Sequence[torch.Tensor]      # float32 [vocab] each
    highest: list[float]                # of each row: its largest, or NaN if it has one
    best: list[int]                     # the token it belongs to
    # Sequences whose input could not be read, while the others were computed; their rows are not among the above.
    failed: Sequence[tuple[PromptSequence, Exception]] = ()


class LayerMemory:
    """What layers remember of sequences between steps, as the engine sees it; sizes in tokens.

    Today keys and values in extents (`kv_cache.KVPool`); this one remembers nothing.  How many tokens a sequence may
    have here is the scheduler's decision.  Where they lie is known to the runner alone.
    """

    @property
    def cached(self) -> int:
        """Tokens of free memory whose content is known."""
        return 0

    def begin(self, owner: str, size: int, items: Sequence[int]) -> int:
        """Give a new owner room for `size` tokens; how many of `items`, its beginning, are computed already."""
        return 0

    def share(self, owner: str, items: Sequence[int]) -> None:
        """The owner's memory begins with `items`: from now on others may begin with them."""

    def release(self, owner: str) -> None:
        """Take the owner's memory back.  Content that was shared stays known until its place is needed."""

    def forget(self) -> None:
        """Forget all known content."""


class ModelRunner(ABC):
    """Computes what the engine schedules."""

    info: ModelInfo
    ready: wire.Ready           # the model's sizes and types; the engine goes by kv_tokens and max_model_len
    memory: LayerMemory

    @property
    def busy(self) -> bool:
        """Whether a step has work even without a request."""
        return False

    def handle(self, message: wire.ToWorker) -> bool:
        """Whether the message was for the runner (arenas opened and closed) and is done."""
        return False

    @abstractmethod
    def prepare(self, request: PromptSequence) -> None:
        """Fill in a new request's input.  Raises BadRequest, and WorkerFailed if a lease cannot be read here."""

    def stepping(self) -> AbstractContextManager[object]:
        """`with`: one step, from its scheduling to its last token.  The other calls of the step are made inside."""
        return nullcontext()

    @abstractmethod
    def execute(self, batch: Batch[PromptSequence]) -> StepOutput:
        """Compute `count` tokens of each sequence from `computed` on, and wait for the result."""

    def fault(self, error: Exception) -> Exception:
        """What an error of a step is: a DeviceError ends the worker, any other fails the sequences concerned."""
        return error

    def capture(self) -> None:
        """Record what can be replayed, after the first steps have run (CUDA graphs)."""
