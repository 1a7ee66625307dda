from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from epdd import families
from epdd.worker.vision import preprocess
from epdd.worker.vision.decode_image import decode
from tests.models import checkpoints

SIZES = [(1, 1), (22, 3), (3, 22), (1000, 5), (60, 1), (56, 56), (100, 60), (333, 251), (640, 480), (1500, 900)]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def normalised(patches: np.ndarray[Any, Any], family: families.ModelInfo) -> np.ndarray[Any, Any]:
    """The effect of the patch embedding's folded weights on the bytes, by hand, with the still's second frame."""
    cube = patches.reshape(len(patches), 3, 1, family.patch, family.patch) / 255.0
    mean, std = (np.array(x).reshape(1, 3, 1, 1, 1) for x in (family.mean, family.std))
    return np.repeat((cube - mean) / std, family.temporal, 2).reshape(len(patches), -1)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_reference_processor(checkpoint: Callable[..., str], kind: str, size: tuple[int, int]) -> None:
    folder = checkpoint(kind)
    family = families.load(folder)
    image = checkpoints.picture(*size, seed=sum(size))
    reference, grids = checkpoints.pixel_values(folder, [image])
    grid = family.grid(*size)
    assert list(grid) == grids[0].tolist()
    found = preprocess.patches(decode(png(image), size), family, grid)
    assert found.dtype == np.uint8
    np.testing.assert_allclose(normalised(found, family), reference.numpy(), atol=1e-5)


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK"])
def test_modes_equal_the_reference_processor(checkpoint: Callable[..., str], mode: str) -> None:
    folder = checkpoint("qwen3_vl")
    family = families.load(folder)
    image = checkpoints.picture(150, 90).convert(mode)
    file = io.BytesIO()
    image.save(file, "JPEG" if mode == "CMYK" else "PNG")
    opened = Image.open(io.BytesIO(file.getvalue()))
    reference, _ = checkpoints.pixel_values(folder, [opened])
    found = preprocess.patches(decode(file.getvalue(), (150, 90)), family, family.grid(150, 90))
    np.testing.assert_allclose(normalised(found, family), reference.numpy(), atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bounds", [(0, 0), (4000, 9000), (60000, 100000), (3136, 3136)])
def test_any_bounds_of_the_daemon_are_accepted(checkpoint: Callable[..., str], size: tuple[int, int],
                                               bounds: tuple[int, int]) -> None:
    family = families.load(checkpoint("qwen3_vl"))
    grid = family.grid(*size, *bounds)
    found = preprocess.patches(decode(png(checkpoints.picture(*size)), size), family, grid)
    assert len(found) == grid[1] * grid[2]
