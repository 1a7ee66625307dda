"""Which quantised checkpoints are served, and the one sentence that refuses each other one, by headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from epdd.checkpoint import headers, quantization
from epdd.checkpoint.quantization import Quantization, Scale
from epdd.errors import ModelError
from tests.models.quantized import QWEN, compressed

FP8 = torch.float8_e4m3fn
MATRIX = torch.zeros(100, 60).to(FP8)
ONE = torch.ones(1)


def read(root: Path, settings: Any, **tensors: torch.Tensor) -> Quantization:
    """Of a checkpoint with these tensors, their names' double underscores being dots."""
    root.mkdir(exist_ok=True)
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, root / "model.safetensors")
    config = {} if settings is None else {"quantization_config": settings}
    (root / "config.json").write_text(json.dumps(config))
    return quantization.read(root, config, headers.all_tensors(root))


def refused(root: Path, settings: Any, **tensors: torch.Tensor) -> str:
    with pytest.raises(ModelError) as caught:
        read(root, settings, **tensors)
    message = caught.value.message
    assert "\n" not in message and "pip install" not in message
    assert "config.json" in message or "model.safetensors" in message
    return message


@pytest.mark.parametrize("settings, scale, rows, columns", [
    (QWEN, torch.ones(5, 3), 24, 24),
    ({**QWEN, "weight_block_size": [128, 128]}, torch.ones(1, 1), 100, 60),
    ({"quant_method": "fp8"}, torch.ones(1, 1), 100, 60),       # blocks of 128, a scale for all: the same
    ({"quant_method": "fp8"}, torch.ones(()), 100, 60),
    ({"quant_method": "fp8", "weight_block_size": None}, torch.ones(100, 1), 1, 60),
    (compressed("tensor"), torch.ones(1), 100, 60),
    (compressed("channel"), torch.ones(100, 1), 1, 60),
    (compressed("channel"), torch.ones(100, dtype=torch.bfloat16), 1, 60),
    (compressed("block", block_structure="16x32"), torch.ones(7, 2), 16, 32),
    (compressed("group", group_size=20), torch.ones(100, 3), 1, 20),
])
def test_what_is_served(tmp_path: Path, settings: Any, scale: torch.Tensor, rows: int, columns: int) -> None:
    found = read(tmp_path, settings, a__weight=MATRIX, a__weight_scale=scale, a__input_scale=ONE,
                 b__weight=torch.zeros(2, 2))
    assert found.scales == {"a.weight": Scale("a.weight_scale", rows, columns)}
    assert found.extra == {"a.weight_scale", "a.input_scale"} and found.text.startswith("FP8 (")


def test_plain_checkpoints_need_nothing(tmp_path: Path) -> None:
    found = read(tmp_path, None, a__weight=torch.zeros(2, 2), b__bias=torch.zeros(2))
    assert not found and found.extra == frozenset() and found.text == "none"


@pytest.mark.parametrize("settings, words", [
    ({"quant_method": "awq", "bits": 4}, "'awq' is not served"),
    ({"quant_method": "gptq", "bits": 4}, "'gptq' is not served"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' is not served"),
    ({"load_in_8bit": True}, "'bitsandbytes' is not served"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt' (NVFP4) is not served"),
    ({"quant_method": "mxfp4"}, "'mxfp4' is not served"),
    ({"bits": 4}, "no quant_method"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not served"),
    ({**QWEN, "weight_block_size": [0, 128]}, "weight_block_size is [0, 128], not two sizes"),
    ({**compressed("tensor"), "sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format 'sparse-24'"),
    (compressed("tensor", num_bits=4), "float of 4 bits is not served"),
    (compressed("tensor", type="int"), "int of 8 bits is not served"),
    (compressed("channel", symmetric=False), "weights.symmetric False is not served"),
    (compressed("banana"), "strategy 'banana' is not served"),
    ("fp8", "quantization_config is not a JSON object"),
])
def test_settings_that_are_refused_by_name(tmp_path: Path, settings: Any, words: str) -> None:
    assert words in refused(tmp_path, settings, a__weight=torch.zeros(2, 2))


@pytest.mark.parametrize("settings, tensors, words", [
    (None, {"a__weight": MATRIX, "a__weight_scale": ONE}, "no quantization_config"),
    (None, {"a__weight": MATRIX}, "no quantization_config"),
    (None, {"a__weight": torch.zeros(2, 2), "a__weight_scale": ONE}, "no quantization_config"),
    (None, {"a__weight": torch.zeros(2, 2, dtype=torch.int8)}, "stored as I8, which is not served"),
    (None, {"a__qweight": torch.zeros(2, 2, dtype=torch.int32)}, "no quantization_config"),
    (QWEN, {"a__weight": MATRIX}, "FP8 without a scale"),
    (QWEN, {"a__weight": MATRIX, "a__weight_scale": ONE, "a__weight_scale_inv": torch.zeros(1)}, "has two scales"),
    (QWEN, {"a__weight": MATRIX, "a__weight_scale_inv": torch.ones(4, 3)}, "has the shape [4, 3]"),
    (QWEN, {"a__weight_scale_inv": torch.ones(5, 3)}, "a matrix that is missing"),
    (QWEN, {"a__weight": torch.zeros(100, 60), "a__weight_scale_inv": torch.ones(5, 3)}, "stored as F32, not in FP8"),
    (QWEN, {"a__weight": torch.zeros(9).to(FP8), "a__weight_scale_inv": ONE}, "only matrices are served in FP8"),
    (QWEN, {"a__weight": MATRIX, "a__weight_scale_inv": torch.ones(5, 3, dtype=torch.uint8)}, "stored as U8"),
    (QWEN, {"a__weight_packed": torch.zeros(2, 2, dtype=torch.uint8)}, "packed integers"),
    (QWEN, {"a__qweight": torch.zeros(2, 2, dtype=torch.int32)}, "AWQ or GPTQ"),
])
def test_tensors_that_do_not_fit_the_settings(tmp_path: Path, settings: Any, tensors: dict[str, torch.Tensor],
                                              words: str) -> None:
    assert words in refused(tmp_path, settings, **tensors)


def test_modelopt_with_its_own_file_only(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(ModelError, match=r"hf_quant_config.json: quantised by ModelOpt \(FP8\), which is not served"):
        read(tmp_path, None, a__weight=MATRIX, a__weight_scale=ONE)
    with pytest.raises(ModelError, match=r"quantised by ModelOpt \(FP8\)"):     # before the weights are downloaded
        quantization.check_settings(tmp_path, {})


def test_what_modelopt_left_beside_weights_that_are_not_quantised(tmp_path: Path) -> None:
    for said in ({"quant_algo": "FP8"}, {"quant_algo": None, "kv_cache_quant_algo": None}):
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
        assert read(tmp_path, None, a__weight=MATRIX.float()) == quantization.Quantization()
    quantization.check_settings(tmp_path, {})


def test_mlx(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="MLX"):
        quantization.read(tmp_path, {"quantization": {"bits": 4}}, {})
