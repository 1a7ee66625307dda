from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from epdd import checkpoint, families
from epdd.errors import ModelError
from tests.families import harness
from tests.models import checkpoints

pytestmark = pytest.mark.takes(20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("checkpoint") / "paddleocr_vl"))


def build(folder: Path) -> Path:
    """Two layers, heads of a size of their own, a projector outside the tower."""
    ids = checkpoints.write_tokenizer(folder)
    text = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
            "pad_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 6, 6]}}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 112, "patch_size": 14, "spatial_merge_size": 2}
    config = type(transformers.AutoConfig.for_model("paddleocr_vl"))(
        text_config=text, vision_config=vision, tie_word_embeddings=False, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"])
    checkpoints.write(folder, config, ids)
    checkpoints.write_json(folder / "preprocessor_config.json", {
        "image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1,
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 64}})
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


def test_the_published_names_and_a_config_without_text_config_are_accepted(folder: str, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json",
                 "generation_config.json"):
        (tmp_path / name).write_bytes((Path(folder) / name).read_bytes())
    config = json.loads((Path(folder) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | config.pop("text_config") | {
        "model_type": "paddleocr_vl"}))
    tensors = load_file(Path(folder) / "model.safetensors")
    old = {name.replace("model.projector", "mlp_AR").replace("model.visual", "visual")
           .replace("model.language_model", "model"): tensor for name, tensor in tensors.items()}
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = checkpoint.look(str(tmp_path)).family
    assert found.parameters == checkpoint.look(folder).family.parameters
    assert found.layers == families.load(folder).layers
    harness.check_embeddings(str(tmp_path))
    harness.check_answers(str(tmp_path))


@pytest.mark.parametrize("file, part, key, value", [
    ("config.json", "text_config", "use_bias", True),
    ("config.json", "vision_config", "num_attention_heads", 3),
    ("config.json", "vision_config", "image_size", "large"),
    ("preprocessor_config.json", "", "temporal_patch_size", 2),
    ("preprocessor_config.json", "", "image_processor_type", "Qwen2VLImageProcessor")])
def test_a_setting_that_cannot_be_served_is_refused_by_name(tmp_path: Path, file: str, part: str, key: str,
                                                            value: Any) -> None:
    folder = build(tmp_path / "paddleocr_vl")
    settings = json.loads((folder / file).read_text())
    (settings[part] if part else settings)[key] = value
    (folder / file).write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=key):
        checkpoint.look(str(folder))
