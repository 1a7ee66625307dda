"""Decoded pixels to patches on a GPU, as `preprocess` does on CPUs.

Pillow's bicubic filter in its order: width first, then height, with bytes in between.  Pillow's weights are fixed-point
numbers, so one pixel in some 100,000 differs by a grey level, which is far less than bfloat16 loses.
"""

from __future__ import annotations

import torch
from torch.nn.functional import interpolate

from epdd.families import ModelInfo


def patches(pixels: torch.Tensor, grid: tuple[int, int, int], info: ModelInfo) -> torch.Tensor:
    """[height, width, 3] bytes to [patches, 3 * patch * patch] bytes on the grid."""
    return cut(resize(pixels, grid[1] * info.patch, grid[2] * info.patch), info)


def resize(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[height, width, 3] bytes."""
    if pixels.shape[1] != width:
        pixels = _filtered(pixels, pixels.shape[0], width)
    if pixels.shape[0] != height:
        pixels = _filtered(pixels, height, width)
    return pixels


def _filtered(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    planes = pixels.permute(2, 0, 1)[None].float()
    made = interpolate(planes, (height, width), mode="bicubic", align_corners=False, antialias=True)
    return made[0].permute(1, 2, 0).add(0.5).floor_().clamp_(0, 255).to(torch.uint8)


def cut(pixels: torch.Tensor, info: ModelInfo) -> torch.Tensor:
    """[height, width, 3] into [patches, 3 * patch * patch], merge x merge neighbours one after another."""
    height, width, channels = pixels.shape
    patch, merge = info.patch, info.merge
    side = patch * merge
    blocks = pixels.reshape(height // side, merge, patch, width // side, merge, patch, channels)
    return blocks.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels * patch * patch)
