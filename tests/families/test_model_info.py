"""What a checkpoint folder says, and the resize rule against transformers' own over many sizes."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from epdd import families
from epdd.errors import MediaError, ModelError
from epdd.families import Defaults

DEMO = Path(__file__).parents[2] / "epdd" / "demo"


def copy(tmp_path, **changes):
    """The demo checkpoint's JSON files with values changed: `file__key=value`."""
    for name in ("config", "preprocessor_config", "generation_config"):
        data = json.loads((DEMO / f"{name}.json").read_text())
        for key, value in changes.items():
            file, _, field = key.partition("__")
            if file == name:
                data[field] = value
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return families.load(str(tmp_path))


@pytest.mark.parametrize("factor, low, high", [(28, 3136, 1003520), (32, 65536, 16777216), (16, 4096, 9216)])
def test_grid_is_smart_resize_for_2000_sizes(factor, low, high):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
    family = dataclasses.replace(families.load(str(DEMO)), patch=factor // 2, min_pixels=low, max_pixels=high)
    rng = random.Random(factor)
    for _ in range(2000):
        width, height = (int(2 ** rng.uniform(0, 13)) for _ in range(2))
        if max(width, height) / min(width, height) > 200:
            with pytest.raises(MediaError):
                family.grid(width, height)
            continue
        rows, columns = smart_resize(height, width, factor, low, high)
        grid = family.grid(width, height)
        assert grid == (1, rows * 2 // factor, columns * 2 // factor), (width, height)
        assert family.rows(grid) == rows * columns // factor ** 2


def test_exactly_200_is_legal():
    family = families.load(str(DEMO))
    assert family.grid(1000, 5)[0] == 1
    with pytest.raises(MediaError):
        family.grid(1093, 5)


def test_facts_of_the_demo_model():
    family = families.load(str(DEMO))
    assert (family.model_type, family.planes, family.merge) == ("qwen3_vl", 3, 2)
    assert family.embedding_bytes(10) == 10 * family.hidden * 3 * 4
    assert family.defaults == Defaults(temperature=0.0)


def test_sampling_defaults_and_eos_come_from_the_checkpoint(tmp_path):
    family = copy(tmp_path, generation_config__do_sample=True, generation_config__temperature=0.7,
                  generation_config__top_p=0.8, generation_config__top_k=20, generation_config__eos_token_id=5)
    assert family.defaults == Defaults(0.7, 0.8, 20, 1.0) and family.eos_ids == (5, 762)


@pytest.mark.parametrize("size, expected", [
    ({"shortest_edge": 1, "longest_edge": 2}, (1, 2)), ({"min_pixels": 3, "max_pixels": 4}, (3, 4))])
def test_pixel_limits_in_all_spellings(tmp_path, size, expected):
    family = copy(tmp_path, preprocessor_config__size=size)
    assert (family.min_pixels, family.max_pixels) == expected


@pytest.mark.parametrize("change, match", [
    ({"config__model_type": "llava"}, "llava"), ({"config__vision_config": {}}, "hidden_size"),
    ({"config__image_token_id": "x"}, "config.json: image_token_id is \"x\"")])
def test_what_is_wrong_is_named(tmp_path, change, match):
    with pytest.raises(ModelError, match=match):
        copy(tmp_path, **change)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match="config.json"):
        families.load(str(tmp_path / "nothing"))
