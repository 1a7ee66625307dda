"""What a vision tower needs to know of its images' grids: positions, rotary tables, which rows attend to which.

transformers computes all this in each forward, with loops over images and, on a GPU, waits; here once a grid.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import vision_utils

Grid = tuple[int, int, int]             # t, rows, columns in patches, before merging
Tables = dict[str, Any]                 # what the tower's forward takes besides the patches

# Tables kept, counted by their patches: about 1 KB each, so 64 MB at most.
PATCHES_MAX = 1 << 16


@dataclass(frozen=True)
class Segments:
    """Which patches attend to each other: the packed images, or windows of them, one after another."""

    lengths: tuple[int, ...]
    bounds: torch.Tensor                        # int32 [segments + 1], on the tower's device
    runs: tuple[tuple[int, int, int], ...]      # (start, length, count): neighbours of equal length together

    @functools.cached_property
    def lengths_tensor(self) -> torch.Tensor:
        """The lengths, int64 on the CPU."""
        return torch.tensor(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)


def segments(bounds: torch.Tensor, device: torch.device) -> Segments:
    """From cumulative lengths, int [segments + 1], on the CPU."""
    lengths = tuple(bounds.diff().tolist())
    runs, start = [], 0
    for length, group in itertools.groupby(lengths):
        count = len(list(group))
        runs.append((start, length, count))
        start += length * count
    return Segments(lengths, bounds.to(device, torch.int32), tuple(runs))


def tables(module: Any) -> Callable[[Sequence[Grid]], Tables]:
    """A function from a batch's grids to the keyword arguments of the tower's forward, the latest batches kept."""
    rotary = module.rotary_pos_emb
    device = module.patch_embed.product.weight.device
    kept: OrderedDict[tuple[Grid, ...], Tables] = OrderedDict()

    def of(grids: Sequence[Grid]) -> Tables:
        key = tuple(grids)
        if key in kept:
            kept.move_to_end(key)
            return dict(kept[key])
        made = kept[key] = _compute(module, rotary, key, device)
        while len(kept) > 1 and sum(_patches(grids) for grids in kept) > PATCHES_MAX:
            kept.popitem(last=False)
        return dict(made)

    return of


def _patches(grids: Sequence[Grid]) -> int:
    return sum(t * rows * columns for t, rows, columns in grids)


def _compute(module: Any, rotary: Any, grids: tuple[Grid, ...], device: torch.device) -> Tables:
    grid = torch.tensor(grids)
    merge = module.spatial_merge_size
    positions = vision_utils.get_vision_position_ids(grid, merge).to(device)
    made: Tables = {
        "grid_thw": grid,
        "position_ids": rotary(torch.empty(0, device=device), positions),
        "cu_seqlens": segments(vision_utils.get_vision_cu_seqlens(grid), device),
    }
    if hasattr(module, "pos_embed"):
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid, num_grid_per_side=module.num_grid_per_side, mode=module.interpolation_mode,
            align_corners=module.interpolation_align_corners, spatial_merge_size=merge)
        made |= {"interp_indices": indices.to(device), "interp_weights": weights.to(device)}
    if hasattr(module, "window_size"):
        index, bounds = vision_utils.get_vision_window_index(grid, merge, module.window_size, module.patch_size)
        made |= {"window_index": index.to(device), "cu_window_seqlens": segments(bounds, device)}
    return made
