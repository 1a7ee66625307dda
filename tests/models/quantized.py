"""Checkpoints in FP8, made from others, each with the checkpoint that was dequantised by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 24      # divides no side, so that blocks at two edges are cut off
QWEN = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    group = {"targets": ["Linear"], "format": "float-quantized", "input_activations": {"type": "float", "num_bits": 8},
             "weights": {"type": "float", "num_bits": 8, "strategy": strategy, "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": group}}


SCHEMES: dict[str, tuple[dict[str, Any], str]] = {
    "block": (QWEN, "weight_scale_inv"),
    "tensor": (compressed("tensor"), "weight_scale"),
    "channel": (compressed("channel"), "weight_scale"),
    "compressed block": (compressed("block", block_structure=[BLOCK, BLOCK]), "weight_scale"),
}


def build(source: Path, folder: Path, scheme: str, dtype: torch.dtype, scale_dtype: torch.dtype = torch.float32
          ) -> tuple[Path, Path]:
    """(the checkpoint in FP8, the same dequantised by hand in `dtype`): matrices of both halves' layers.

    The language model's first layer is not quantised, like matrices that quantisers leave out.
    """
    config, kind = SCHEMES[scheme]
    quantized, plain = folder / "fp8", folder / "plain"
    for target in (quantized, plain):
        shutil.copytree(source, target)
    rng = torch.Generator().manual_seed(7)
    for path in sorted(source.glob("*.safetensors")):
        stored, by_hand = {}, {}
        for name, tensor in load_file(path).items():
            if tensor.ndim != 2 or ".layers.0." in name or not ("layers." in name or "blocks." in name):
                stored[name] = by_hand[name] = tensor
                continue
            scales, whole = _scales(scheme, tensor, rng, scale_dtype)
            fp8 = (tensor.float() / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored[name], stored[name.removesuffix("weight") + kind] = fp8, scales
            if scheme == "tensor":      # of activations, which are not used
                stored[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
            by_hand[name] = (fp8.float() * whole).to(dtype)
        save_file(stored, quantized / path.name, metadata={"format": "pt"})
        save_file(by_hand, plain / path.name, metadata={"format": "pt"})
        index = quantized / "model.safetensors.index.json"
        if index.is_file():
            listed = json.loads(index.read_text())
            listed["weight_map"] |= dict.fromkeys(stored, path.name)
            index.write_text(json.dumps(listed))
    edit(quantized, quantization_config=config)
    return quantized, plain


def edit(folder: Path, **fields: Any) -> None:
    """Set fields of config.json; None takes one away."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def _scales(scheme: str, tensor: torch.Tensor, rng: torch.Generator, dtype: torch.dtype
            ) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as stored, and expanded to the matrix."""
    rows, columns = tensor.shape
    high, wide = {"tensor": (rows, columns), "channel": (1, columns)}.get(scheme, (BLOCK, BLOCK))
    scales = (torch.rand(-(-rows // high), -(-columns // wide), generator=rng) * 0.01 + 0.001).to(dtype)
    whole = scales.float().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return scales.reshape(()) if scheme == "tensor" else scales, whole
