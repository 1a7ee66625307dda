"""Images' rows on their way from leases into a step."""

from __future__ import annotations

from typing import Any

import torch

from epdd import wire
from epdd.worker.gpu.transfer import Fetched, Transfer
from epdd.worker.kernels.cuda import Device
from epdd.worker.language.batch_inputs import HostRows, pieces, rows_within
from epdd.worker.language.model_runner import PromptSequence
from epdd.worker.language.scheduler import Batch


class Leased:
    """An image's embeddings in a lease, copied to the device as chunks of the prompt need them.

    `ask` begins a copy during the step before the one that needs it; there is at most one such range.
    """

    def __init__(self, span: wire.Span, shape: tuple[int, int, int], device: Device, transfer: Transfer) -> None:
        """`shape`: [planes, rows, hidden] of the lease."""
        self.places, self.rows = span.places, span.rows
        self.arena = span.lease.arena
        self._lease, self._shape, self._dtype = span.lease, shape, getattr(torch, span.dtype)
        self._device, self._transfer = device, transfer
        self._ahead: tuple[int, Fetched] | None = None      # its first row

    def ask(self, low: int, high: int) -> None:
        """Begin to copy rows [low, high)."""
        self._ahead = low, self._transfer.fetch(self._lease, self._shape, self._dtype, low, high)

    def take(self, low: int, high: int) -> torch.Tensor:
        """Rows [low, high) on the device: kernels launched from now on may read them."""
        first, fetched = self._ahead or (0, None)
        if len(self.places) == 1:       # later runs of one image may need the rest of the range
            self._ahead = None
        if fetched is None or low < first or high > first + fetched.planes.shape[1]:
            first, fetched = low, self._transfer.fetch(self._lease, self._shape, self._dtype, low, high)
        self._device.wait(fetched.arrived)
        return fetched.planes[:, low - first:high - first]

    def kept(self) -> HostRows:
        """A copy in the host's memory: the device's memory is planned without such copies."""
        return HostRows(self.places, self.take(0, self.rows).to("cpu"))

    def wait(self) -> None:
        """Return when no copy from the lease is under way."""
        self._device.synchronise(self._transfer.stream)


def ask_ahead(batch: Batch[PromptSequence], budget: int) -> None:
    """Begin to copy what the next chunks of the batch's prompts will need, up to `budget` tokens of each."""
    for request, count in batch.chunks:
        low, high = request.computed + count, request.computed + count + budget
        for image in request.images:
            first, last = rows_within(image.places, low, high)
            if isinstance(image, Leased) and first < last:
                image.ask(first, last)


def splice(batch: Batch[PromptSequence], embeds: torch.Tensor) -> dict[str, Any]:
    """As `batch_inputs.splice`, without making the device count the rows of a mask in each layer.

    The deepstack planes are as long as the batch, zero where there is no image, and added to the one sequence of the
    packed batch: the index that stands for the mask.
    """
    deep: torch.Tensor | None = None
    for row, image, low, high in pieces(batch):
        part = image.take(low, high).to(embeds.device, non_blocking=True).to(embeds.dtype)
        embeds[row:row + high - low] = part[0]
        if len(part) > 1:
            if deep is None:
                deep = embeds.new_zeros(len(part) - 1, 1, *embeds.shape)
            deep[:, 0, row:row + high - low] = part[1:]
    if deep is None:
        return {}
    return {"visual_pos_masks": torch.zeros(1, dtype=torch.long, device=embeds.device),
            "deepstack_visual_embeds": list(deep)}
