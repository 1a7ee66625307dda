from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from epdd import checkpoint
from epdd.errors import ModelError
from tests.families import harness
from tests.models import checkpoints

pytestmark = pytest.mark.takes(60)

FAMILIES = ("glm4v", "glm46v", "glm_ocr")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("checkpoint") / request.param, request.param))


def build(folder: Path, family: str) -> Path:
    """Two layers, positions over half of each head in GLM-4V, heads of a size of their own in GLM-OCR."""
    ids = checkpoints.write_tokenizer(folder)
    text: dict[str, Any] = {
        "vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "pad_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                            "mrope_section": [1, 1, 2]}}
    vision: dict[str, Any] = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "image_size": 112, "patch_size": 14,
        "out_hidden_size": 64}
    if family == "glm_ocr":
        text["head_dim"] = 32
        text["rope_parameters"] |= {"partial_rotary_factor": 1.0, "mrope_section": [4, 6, 6]}
    names = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
    start, end, image, video = (ids[name] for name in names)
    config = type(transformers.AutoConfig.for_model(family))(
        text_config=text, vision_config=vision, image_token_id=image, video_token_id=video, image_start_token_id=start,
        image_end_token_id=end, video_start_token_id=ids["<|vision_pad|>"], video_end_token_id=ids["<|im_start|>"])
    checkpoints.write(folder, config, ids)
    checkpoints.write_json(folder / "preprocessor_config.json", {
        "image_processor_type": "Glm4vImageProcessor" if family == "glm4v" else "Glm46VImageProcessor",
        "size": {"shortest_edge": 112 * 112, "longest_edge": 2 * 28 * 28 * 64}})
    return folder


def test_the_folder_is_what_the_family_expects(folder: str) -> None:
    harness.check_folder(folder)


def test_counts(folder: str) -> None:
    harness.check_counts(folder)


def test_pixels(folder: str) -> None:
    harness.check_pixels(folder)


def test_embeddings(folder: str) -> None:
    harness.check_embeddings(folder)


def test_prompt(folder: str) -> None:
    harness.check_prompt(folder)


def test_answers(folder: str) -> None:
    harness.check_answers(folder)


@pytest.mark.parametrize("part, key, value, said", [
    ("text_config", "num_attention_heads", 3, "num_attention_heads"),
    ("vision_config", "num_heads", 3, "num_heads"),
    ("vision_config", "out_hidden_size", 32, "out_hidden_size"),
    ("vision_config", "image_size", "large", "image_size"),
    ("vision_config", "hidden_act", "relu", "hidden_act"),
    ("text_config", "layer_types", ["sliding_attention", "full_attention"], "sliding_attention"),
    ("text_config", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]},
     "mrope_section")])
def test_a_config_that_cannot_be_served_is_refused_by_name(tmp_path: Path, part: str, key: str, value: Any,
                                                           said: str) -> None:
    folder = build(tmp_path / "glm4v", "glm4v")
    config = json.loads((folder / "config.json").read_text())
    config[part][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said):
        checkpoint.look(str(folder))
