"""How decoded pixels become the arguments of a vision module as transformers has it.

An image is prepared as bytes, in the helper thread.  The bytes of a batch's images lie one after another; `arguments`
makes the values that transformers' own image processor would have made, bit by bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from epdd.families import ModelInfo
from epdd.worker.vision import preprocess
from epdd.worker.vision.decode_image import Pixels
from epdd.worker.vision.grids import Grid


class VisionInput(ABC):
    """The rule of one kind of image processor."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self._table = torch.from_numpy(table(info))

    @abstractmethod
    def prepare(self, pixels: Pixels, grid: Grid) -> NDArray[np.uint8]:
        """Bytes [n, ...] of upright pixels [height, width, 3] on the daemon's grid; `n` may differ between images."""

    @abstractmethod
    def arguments(self, data: torch.Tensor, grids: list[Grid]) -> dict[str, Any]:
        """Of `get_image_features`, pixel values in float32, from the bytes of all images [sum of n, ...]."""

    def values(self, data: torch.Tensor, channel: int) -> torch.Tensor:
        """float32 values of bytes whose axis `channel` has the three channels."""
        moved = data.movedim(channel, 0)
        made = torch.stack([each[plane.int()] for each, plane in zip(self._table.to(data.device), moved)])
        return made.movedim(0, channel)


class Patches(VisionInput):
    """Qwen2VLImageProcessor and its kin: patches [n, channels * temporal * patch * patch], and the grids."""

    def prepare(self, pixels: Pixels, grid: Grid) -> NDArray[np.uint8]:
        return preprocess.patches(pixels, self.info, grid)

    def arguments(self, data: torch.Tensor, grids: list[Grid]) -> dict[str, Any]:
        side, temporal = self.info.patch ** 2, self.info.temporal
        values = self.values(data.view(-1, 3, side), 1)
        # A still's frames are equal.
        values = values[:, :, None].expand(-1, -1, temporal, -1).reshape(len(data), -1)
        return {"pixel_values": values, "image_grid_thw": torch.tensor(grids, device=data.device)}


class Rows(VisionInput):
    """PaddleOCRVLImageProcessor: patches [n, channels, patch, patch] row by row, whatever is merged later."""

    def prepare(self, pixels: Pixels, grid: Grid) -> NDArray[np.uint8]:
        _, rows, columns = grid
        side = self.info.patch
        whole = preprocess.resize(pixels, rows * side, columns * side)
        return whole.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side)

    def arguments(self, data: torch.Tensor, grids: list[Grid]) -> dict[str, Any]:
        return {"pixel_values": self.values(data, 1), "image_grid_thw": torch.tensor(grids, device=data.device)}


# Family.vision_input -> its rule
INPUTS: dict[str, type[VisionInput]] = {"patches": Patches, "rows": Rows}


def table(info: ModelInfo) -> NDArray[np.float32]:
    """[3, 256]: the value of each byte in each channel, rounded as transformers' rescale and normalize round."""
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean, std = (np.array(each, np.float32)[:, None] for each in (info.mean, info.std))
    return (scaled - mean) / std
