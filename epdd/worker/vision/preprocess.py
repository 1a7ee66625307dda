"""Upright pixels to the patches a vision tower reads.

Order of patches and of bytes inside a patch is that of transformers' Qwen2VLImageProcessor.  Patches stay
bytes: rescaling, normalisation and the still's second frame are folded into the patch embedding's weights
(encoder.py), an eighth of the memory traffic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from epdd.families import ModelInfo
from epdd.worker.vision.decode_image import Pixels


def patches(pixels: Pixels, info: ModelInfo, grid: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Upright pixels [height, width, 3] as [patches, 3 * patch * patch] bytes on the daemon's grid."""
    _, rows, columns = grid
    return cut(resize(pixels, rows * info.patch, columns * info.patch), info)


def resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """Pillow's bicubic filter on bytes: bit-identical to the reference processor, which torch's is not."""
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize((width, height), Image.Resampling.BICUBIC))


def cut(pixels: Pixels, info: ModelInfo) -> NDArray[np.uint8]:
    """[height, width, 3] into [patches, 3 * patch * patch], merge x merge neighbours one after another."""
    height, width, channels = pixels.shape
    patch, merge = info.patch, info.merge
    side = patch * merge
    blocks = pixels.reshape(height // side, merge, patch, width // side, merge, patch, channels)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels * patch * patch)
