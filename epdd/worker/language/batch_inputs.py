"""The text model's input in a step: token ids, positions, and images' embeddings in place of placeholders.

Functions of a batch; a chunk may begin or end inside an image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epdd import wire
from epdd.worker.language.model_runner import PromptImage, PromptSequence
from epdd.worker.language.scheduler import Batch


@dataclass(frozen=True)
class HostRows:
    """An image's embeddings in the host's memory."""

    places: tuple[wire.Run, ...]
    planes: torch.Tensor        # [planes, rows, hidden]
    arena: None = None

    def take(self, low: int, high: int) -> torch.Tensor:
        return self.planes[:, low:high]

    def kept(self) -> HostRows:
        return HostRows(self.places, self.planes.clone())

    def wait(self) -> None:
        """Nothing copies in the background."""


def content(tokens: list[int], spans: tuple[wire.Span, ...], salt: str = "") -> tuple[int, ...]:
    """A prompt as the prefix cache compares it: a number made of the image replaces the first of its tokens.

    The other tokens and all later positions follow from it.  A salt changes the first item, so that only prompts
    with the same salt have a common prefix.
    """
    items = list(tokens)
    for span in spans:
        name = hashlib.blake2b(f"{span.digest} {span.grid}".encode(), digest_size=20).digest()
        items[span.start] = int.from_bytes(b"\1" + name)   # larger than any token id
    if salt:
        name = hashlib.blake2b(f"{salt} {items[0]}".encode(), digest_size=20).digest()
        items[0] = int.from_bytes(b"\2" + name)
    return tuple(items)


def ids(batch: Batch[PromptSequence]) -> list[int]:
    """The token of each row."""
    return [token for request, count in batch.chunks
            for token in request.tokens[request.computed:request.computed + count]]


def wanted(batch: Batch[PromptSequence]) -> list[int]:
    """Rows of the batch whose next token is not known yet."""
    rows, end = [], 0
    for request, count in batch.chunks:
        end += count
        if request.pending == count:
            rows.append(end - 1)
    return rows


def positions(batch: Batch[PromptSequence]) -> torch.Tensor:
    """Temporal, vertical and horizontal position of each row, [3, T]."""
    pieces: list[torch.Tensor] = []
    single: list[int] = []
    for request, count in batch.chunks:
        start, end = request.computed, request.computed + count
        if count == 1 and start >= request.prompt:
            single.append(start + request.delta)
            continue
        if single:      # a run of decode tokens ends
            pieces.append(torch.tensor(single).expand(3, -1))
            single = []
        if request.positions is not None and start < request.prompt:
            pieces.append(request.positions[:, start:end])
            start = min(end, request.prompt)
        if start < end:
            pieces.append(torch.arange(start + request.delta, end + request.delta).expand(3, -1))
    if single:
        pieces.append(torch.tensor(single).expand(3, -1))
    return torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]


def pieces(batch: Batch[PromptSequence]) -> Iterator[tuple[int, PromptImage, int, int]]:
    """(row of the batch, image, low, high) of each image's rows [low, high) that are among the batch's."""
    row = 0
    for request, count in batch.chunks:
        start, end = request.computed, request.computed + count
        for image in request.images:
            first = 0       # the image's row at `place`
            for place, rows in image.places:
                low, high = max(start, place), min(end, place + rows)
                if low < high:
                    yield row + low - start, image, first + low - place, first + high - place
                first += rows
        row += count


def rows_within(places: Sequence[wire.Run], start: int, end: int) -> tuple[int, int]:
    """(low, high): rows [low, high) of an image lie in the tokens [start, end) of its prompt."""
    low = sum(min(max(start - place, 0), rows) for place, rows in places)
    return low, sum(min(max(end - place, 0), rows) for place, rows in places)


def splice(batch: Batch[PromptSequence], embeds: torch.Tensor) -> dict[str, Any]:
    """Write images' rows into `embeds` [T, hidden]; the text model's arguments for their deepstack planes."""
    deep: list[torch.Tensor] = []
    mask = torch.zeros(len(embeds), dtype=torch.bool)
    for row, image, low, high in pieces(batch):
        part = image.take(low, high).to(embeds.dtype)
        embeds[row:row + high - low] = part[0]
        mask[row:row + high - low] = True
        deep.append(part[1:])
    if not deep or not len(deep[0]):
        return {}
    return {"visual_pos_masks": mask[None], "deepstack_visual_embeds": list(torch.cat(deep, 1))}
