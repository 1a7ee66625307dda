"""The backends of NVIDIA GPUs: torch's products as they are, attention by one kernel for all packed images.

Not proved on a GPU yet.  What the choice cannot call, or finds wrong on the card, is refused there, and attention goes
image by image as on CPUs.  CUDA graphs and torch.compile are left out: grids differ from batch to batch, and nothing
has been measured that would pay for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from epdd.worker.vision.backends import Run
from epdd.worker.vision.backends.cpu import Plain
from epdd.worker.vision.grids import Segments
from epdd.worker.vision.tower import Tower

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments], torch.Tensor]


class Flash(Plain):
    """The flash kernel that torch ships, over all images of a batch at once."""

    name = "flash"

    def missing(self, tower: Tower) -> str:
        if tower.device.type != "cuda":
            return "for GPUs only"
        if tower.dtype not in (torch.bfloat16, torch.float16):
            return f"not for {str(tower.dtype).removeprefix('torch.')}"
        return ""

    def prepare(self, tower: Tower) -> Run:
        for block in tower.module.blocks:
            block.attn.attend = self._attend(block.attn.scaling)
        return tower

    def _attend(self, scale: float) -> Attend:
        return partial(_flash, scale)


class VarlenAttention(Flash):
    """The same by torch's public name for it, where that has a scale to set: from torch 2.12 on."""

    name = "varlen_attn"

    def _attend(self, scale: float) -> Attend:
        return partial(_varlen, scale)


def _flash(scale: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           segments: Segments) -> torch.Tensor:
    """[n, heads, head_dim] of each to the same shape."""
    bounds, longest = segments.bounds, segments.longest
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, bounds, longest, longest, 0.0, False, False, scale=scale)[0]
    return out


def _varlen(scale: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            segments: Segments) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = segments.bounds, segments.longest
    out: torch.Tensor = varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale)
    return out
