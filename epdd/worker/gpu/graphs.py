"""Decode steps as CUDA graphs: recorded once for a few batch sizes, then replayed with other numbers in their buffers.

A step of a 36-layer model launches about a thousand kernels of a few microseconds each; launched one by one from
Python, the card waits for them most of the time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from epdd.worker.gpu import flash

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, *range(8, 65, 8), *range(96, 257, 32))     # sequences; a batch takes the next larger graph
RECORD_S = 30.0         # for all of them, at start: a size that is not recorded by then runs without a graph

ID, POSITIONS, SLOT, LENGTH, OFFSET, WIDTH = 0, slice(1, 4), 4, 5, 6, 7     # rows of a graph's table

# Token ids [n], positions [3, n] and the layout to (the largest logit and its id [2, n], logits [n, vocab]).
Compute = Callable[[torch.Tensor, torch.Tensor, flash.FlashPlan], tuple[torch.Tensor, torch.Tensor]]
# Records the kernels of a function; returns what replays them, and the tensors that then have the results.
Recorder = Callable[[Callable[[], tuple[torch.Tensor, torch.Tensor]]],
                    tuple[Callable[[], None], tuple[torch.Tensor, torch.Tensor]]]


@dataclass(frozen=True)
class Graph:
    """One batch size."""

    table: torch.Tensor             # int32 [WIDTH, size + 1]: all that changes from step to step
    replay: Callable[[], None]
    results: tuple[torch.Tensor, torch.Tensor]


class Graphs:
    """The recorded sizes, largest first, so that the smaller ones fit into its memory."""

    def __init__(self, compute: Compute, kernel: flash.Kernel, record: Recorder, sizes_max: int, length_max: int,
                 device: torch.device, upload: Callable[[torch.Tensor], torch.Tensor],
                 sizes: Sequence[int] = SIZES) -> None:
        """`upload(tensor)`: a copy in pinned memory.

        Recording runs the step: it writes keys and values of one token into slot 0 of the pool.
        """
        self._graphs: dict[int, Graph] = {}
        self._upload = upload
        begin = time.monotonic()
        wanted = sorted({min(size, sizes_max) for size in sizes}, reverse=True)
        for size in wanted:
            if time.monotonic() - begin > RECORD_S:
                log.warning("decode graphs: %d of %d recorded in time", len(self._graphs), len(wanted))
                break
            try:
                self._graphs[size] = _recorded(compute, kernel, record, size, length_max, device)
            except RuntimeError as error:
                log.warning("decode steps of %d sequences run without a graph: %s", size,
                            str(error).partition("\n")[0])
                break
        self.sizes = tuple(sorted(self._graphs))

    def fits(self, size: int) -> bool:
        return bool(self.sizes) and size <= self.sizes[-1]

    def run(self, ids: list[int], positions: torch.Tensor, layout: list[tuple[int, int, int]]
            ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token of each sequence: `positions` [3, n] on the host, `layout` as of `flash.plan`.

        The results hold until the next run.
        """
        count = len(ids)
        size = next(size for size in self.sizes if size >= count)
        graph = self._graphs[size]
        table = torch.zeros(WIDTH, size + 1, dtype=torch.int32)
        table[ID, :count] = torch.tensor(ids)
        table[POSITIONS, :count] = positions.int()
        numbers = torch.tensor([(offset + past, past + 1, offset) for _, offset, past in layout], dtype=torch.int32)
        table[SLOT:WIDTH, :count] = numbers.T
        # The graph's spare rows compute the first sequence's token again and write it to the same place.
        table[:, count:] = table[:, :1]
        graph.table.copy_(self._upload(table), non_blocking=True)
        graph.replay()
        best, logits = graph.results
        return best[:, :count], logits[:count]


def _recorded(compute: Compute, kernel: flash.Kernel, record: Recorder, size: int, length_max: int,
              device: torch.device) -> Graph:
    table = torch.zeros(WIDTH, size + 1, dtype=torch.int32, device=device)
    table[LENGTH] = 1
    firsts = torch.arange(size + 1, dtype=torch.int32, device=device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        part = flash.FlashCall(0, size, firsts, table[OFFSET], table[LENGTH, :size], 1, length_max)
        return compute(table[ID, :size].long(), table[POSITIONS, :size].long(),
                       flash.FlashPlan(table[SLOT, :size].long(), (part,), kernel))

    replay, results = record(step)
    return Graph(table, replay, results)
