"""The vision half of a model as transformers has it, for families without a tower of `tower.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from epdd.families import ModelInfo
from epdd.worker.vision.decode_image import Pixels
from epdd.worker.vision.grids import Grid
from epdd.worker.vision.inputs import VisionInput


class PlainTower:
    """Bytes and grids in, planes out, by `get_image_features`; see `tower.Tower`."""

    def __init__(self, load: Callable[[], Any], info: ModelInfo, rule: VisionInput) -> None:
        """`load` gives transformers' base model without its language half, each time anew."""
        self.info, self._load, self._rule = info, load, rule
        self.reload()

    def reload(self) -> None:
        """Begin again with the weights as loaded, whatever a backend has made of them."""
        self.module: Any = None         # the old ones go first
        self.module = self._load()
        weight = next(self.module.parameters())
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self.parameters: int = sum(p.numel() for p in self.module.parameters())

    def prepare(self, pixels: Pixels, grid: Grid) -> NDArray[np.uint8]:
        """What `__call__` takes of one image, from its upright pixels [height, width, 3]."""
        return self._rule.prepare(pixels, grid)

    def blank(self, patches: int) -> tuple[NDArray[np.uint8], Grid]:
        """The same of a black square of about that many patches, or of the nearest size that the family has."""
        side = max(1, math.isqrt(patches)) * self.info.patch
        grid = self.info.grid(side, side)
        return self.prepare(np.zeros((side, side, 3), np.uint8), grid), grid

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def __call__(self, data: torch.Tensor, grids: list[Grid]) -> list[torch.Tensor]:
        """Bytes of all images, one after another, on the tower's device."""
        given = self._rule.arguments(data, grids)
        out = self.module.get_image_features(**given | {"pixel_values": given["pixel_values"].to(self.dtype)},
                                             return_dict=True)
        return [rows(out.pooler_output), *map(rows, getattr(out, "deepstack_features", None) or ())]


def rows(made: Any) -> torch.Tensor:
    """[rows, hidden] of all images, from a tensor or from one for each image."""
    if isinstance(made, torch.Tensor):
        return made.flatten(0, -2)
    return torch.cat([rows(each) for each in made])
