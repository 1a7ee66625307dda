"""Upright pixels to the patches a vision tower reads.

Order of patches and of bytes inside a patch is that of transformers' Qwen2VLImageProcessor.  Patches stay
bytes: rescaling, normalisation and the still's second frame are folded into the patch embedding's weights
(encoder.py), an eighth of the memory traffic.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from epdd.errors import MediaError
from epdd.families import Family
from epdd.worker.decode_image import Pixels, decode


def patches(data: bytes, family: Family, grid: tuple[int, int, int]) -> NDArray[np.uint8]:
    """An image file as [patches, 3 * patch * patch] bytes on the daemon's grid.  Raises MediaError."""
    _, rows, columns = grid
    return cut(resize(pixels(data, family, grid), rows * family.patch, columns * family.patch), family)


def pixels(data: bytes, family: Family, grid: tuple[int, int, int]) -> Pixels:
    """An image file as [height, width, 3] bytes, upright.

    Raises MediaError if it cannot be decoded, or if its pixels have another shape than the header that the daemon made
    the grid from.
    """
    found = decode(data)
    if not _fits(found.shape[0], found.shape[1], family.patch * family.merge, grid, family.merge):
        raise MediaError("the image's pixels have another shape than its header says", code="image_parse_error")
    return found


def resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """Pillow's bicubic filter on bytes: bit-identical to the reference processor, which torch's is not."""
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize((width, height), Image.Resampling.BICUBIC))


def cut(pixels: Pixels, family: Family) -> NDArray[np.uint8]:
    """[height, width, 3] into [patches, 3 * patch * patch], merge x merge neighbours one after another."""
    height, width, channels = pixels.shape
    patch, merge = family.patch, family.merge
    side = patch * merge
    blocks = pixels.reshape(height // side, merge, patch, width // side, merge, patch, channels)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels * patch * patch)


def _fits(height: int, width: int, side: int, grid: tuple[int, int, int], merge: int) -> bool:
    """Whether one scale brings both sides to the grid, each rounded up, down or to the nearest by the resize rule.

    The daemon's bounds on the area, which a client may set, are not known here.
    """
    low, high = 0.0, math.inf
    for length, patches_ in ((height, grid[1]), (width, grid[2])):
        blocks = patches_ // merge
        low = max(low, (blocks - 1) * side / length)
        high = min(high, (blocks + 1) * side / length)
    return low < high
