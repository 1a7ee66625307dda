"""The tower as transformers has it, tried with families that have a faster one too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from epdd import families
from epdd.worker.vision.backends import plain
from epdd.worker.vision.inputs import INPUTS
from epdd.worker.vision.plain_tower import PlainTower, rows
from epdd.worker.weights import load
from tests.models import checkpoints
from tests.worker.language import pd

SIZES = [(100, 60), (56, 56), (333, 251)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_planes_equal_those_of_the_whole_model(checkpoint: Callable[..., str], family: str) -> None:
    folder = checkpoint(family)
    info = families.load(folder)
    tower = PlainTower(lambda: load.load_vision_half(folder, "float32", "cpu"), info, INPUTS["patches"](info))
    images = [checkpoints.picture(*size, seed=i) for i, size in enumerate(SIZES)]
    grids = [info.grid(*size) for size in SIZES]
    data = torch.from_numpy(np.concatenate([tower.prepare(np.asarray(image), grid)
                                            for image, grid in zip(images, grids)]))
    wanted = torch.cat([pd.embed(folder, image)[0] for image in images], 1)
    torch.testing.assert_close(torch.stack(tower(data, grids)), wanted, atol=1e-4, rtol=1e-4)
    chosen = plain.choose(tower)
    assert chosen.name in {trial.backend for trial in chosen.trials if not trial.note}
    torch.testing.assert_close(torch.stack(chosen.run(data, grids)), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_pixel_values_are_the_image_processors(checkpoint: Callable[..., str], family: str) -> None:
    folder = checkpoint(family)
    info = families.load(folder)
    rule = INPUTS["patches"](info)
    for i, size in enumerate(SIZES):
        image = checkpoints.picture(*size, seed=i)
        values, grid = checkpoints.pixel_values(folder, [image])
        made = rule.arguments(torch.from_numpy(rule.prepare(np.asarray(image), info.grid(*size))), [info.grid(*size)])
        assert torch.equal(made["pixel_values"], values) and torch.equal(made["image_grid_thw"], grid)


def test_rows_of_one_tensor_of_a_list_and_of_lists_in_it() -> None:
    whole = torch.rand(6, 4)
    assert all(torch.equal(rows(made), whole) for made in (
        whole, whole.view(2, 3, 4), list(whole.view(2, 3, 4)), [[whole[:1], whole[1:3]], whole[None, 3:]]))
