from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from epdd import families
from epdd.worker.vision import grids, preprocess, tower
from epdd.worker.vision.backends import relative_error
from epdd.worker.weights import load
from tests.models import checkpoints
from tests.worker.language import pd

SIZES = [(100, 60), (56, 56), (56, 56), (333, 251), (22, 3)]


def loaded(folder: str) -> tower.Tower:
    return tower.Tower(lambda: load.load_vision(folder, "float32", "cpu"), families.load(folder))


def patches(image: Image.Image, family: families.ModelInfo) -> torch.Tensor:
    return torch.from_numpy(preprocess.patches(np.asarray(image.convert("RGB")), family, family.grid(*image.size)))


@pytest.mark.parametrize("family", checkpoints.TOWERS)
def test_packed_images_equal_the_untouched_tower_each_alone(checkpoint: Callable[..., str], family: str) -> None:
    made = loaded(checkpoint(family))
    images = [checkpoints.picture(*size, seed=i) for i, size in enumerate(SIZES)]
    for _ in range(2):      # the second time with the tables of the first
        found = made(torch.cat([patches(image, made.info) for image in images]),
                     [made.info.grid(*image.size) for image in images])
        wanted = torch.cat([pd.embed(made.info.folder, image)[0] for image in images], 1)
        assert relative_error(found, list(wanted)) < 1e-5


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_runs_of_segments_cover_all_patches_in_order(lengths: list[int]) -> None:
    made = grids.segments(torch.tensor([0, *lengths]).cumsum(0), torch.device("cpu"))
    assert made.lengths == tuple(lengths) and made.longest == max(lengths)
    assert [length for _, length, count in made.runs for _ in range(count)] == lengths
    assert [start for start, _, _ in made.runs] == [
        sum(length * count for _, length, count in made.runs[:i]) for i in range(len(made.runs))]
    assert all(left[1] != right[1] for left, right in zip(made.runs, made.runs[1:]))


def test_tables_of_the_latest_batches_are_kept(checkpoint: Callable[..., str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    compute = grids._compute

    def counting(module: object, rotary: object, batch: tuple[grids.Grid, ...], device: torch.device) -> grids.Tables:
        computed.append(batch)
        return compute(module, rotary, batch, device)

    monkeypatch.setattr(grids, "_compute", counting)
    monkeypatch.setattr(grids, "PATCHES_MAX", 40)
    of = loaded(checkpoint("qwen3_vl"))._tables
    a, b, c = [(1, 4, 4)], [(1, 4, 6)], [(1, 10, 10)]
    for batch in (a, b, a, b, c, c, a):
        of(batch)
    assert computed == [tuple(batch) for batch in (a, b, c, a)]


def test_a_sample_is_one_block_and_leaves_the_tower_alone(checkpoint: Callable[..., str]) -> None:
    made = loaded(checkpoint("qwen3_vl"))
    image = checkpoints.picture(100, 60)
    batch = patches(image, made.info), [made.info.grid(*image.size)]
    before = made(*batch)
    sample = made.sample()
    assert len(sample.module.blocks) == 1 and len(made.module.blocks) == 4
    for parameter in sample.module.blocks.parameters():
        parameter.zero_()
    assert [plane.shape for plane in sample(*batch)] == [(len(batch[0]), 32)]
    assert relative_error(made(*batch), before) == 0.0


def test_reloading_undoes_what_was_changed(checkpoint: Callable[..., str]) -> None:
    made = loaded(checkpoint("qwen2_5_vl"))
    image = checkpoints.picture(100, 60)
    batch = patches(image, made.info), [made.info.grid(*image.size)]
    before = made(*batch)
    made.module.blocks = made.module.blocks[:1]
    assert relative_error(made(*batch), before) > 0.1
    made.reload()
    assert relative_error(made(*batch), before) == 0.0
