"""Qwen3-VL with experts against transformers; its vision tower is Qwen3-VL's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from epdd import checkpoint
from epdd.errors import ModelError
from tests.families import harness
from tests.models import checkpoints

pytestmark = pytest.mark.takes(20)


@pytest.fixture
def folder(checkpoint: Callable[..., str]) -> str:
    return checkpoint("qwen3_vl_moe")


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


def test_experts_are_taken_as_published_too(folder: str, tmp_path: Path) -> None:
    """Their matrices are turned there."""
    for path in Path(folder).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items() if ".experts." in name}
    assert len(turned) == 4
    save_file(tensors | turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint.look(str(tmp_path)).family.parameters == checkpoint.look(folder).family.parameters
    harness.check_answers(str(tmp_path))


@pytest.mark.parametrize("key, value", [("num_experts", 7), ("num_experts_per_tok", 9), ("num_experts_per_tok", 0),
                                        ("moe_intermediate_size", 32), ("mlp_only_layers", "none"),
                                        ("decoder_sparse_step", 2)])
def test_a_setting_that_does_not_fit_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    folder = checkpoints.build(tmp_path / "moe", "qwen3_vl_moe")
    settings = json.loads((folder / "config.json").read_text())
    settings["text_config"][key] = value
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=f"{key} is|experts|mlp.gate"):
        checkpoint.look(str(folder))
