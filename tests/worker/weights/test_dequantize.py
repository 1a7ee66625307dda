"""FP8 checkpoints against the same ones dequantised by hand: weights, embeddings and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from epdd.checkpoint import headers, look, quantization
from epdd.errors import ModelError
from epdd.worker.kernels import native
from epdd.worker.weights import dequantize, load
from tests.models import checkpoints, quantized
from tests.worker.language import pd


def weights(folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    vision = load.load_vision(str(folder), dtype, "cpu")
    language = load.load_language(str(folder), dtype, "cpu", "sdpa")
    assert type(language.model.language_model.layers[1].mlp.up_proj) is torch.nn.Linear
    return {f"model.visual.{name}": p for name, p in vision.named_parameters()} | dict(language.named_parameters())


@pytest.mark.parametrize("scheme, family, shards", [
    ("block", "qwen3_vl", 3), ("block", "qwen2_5_vl", 1), ("tensor", "qwen3_vl", 1), ("channel", "qwen2_vl", 3),
    ("compressed block", "qwen3_vl", 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_same_weights_as_by_hand(checkpoint: Callable[..., str], tmp_path: Path, scheme: str, family: str,
                                     shards: int, dtype: str) -> None:
    source = Path(checkpoint(family, dtype="bfloat16", shards=shards))
    fp8, plain = quantized.build(source, tmp_path, scheme, getattr(torch, dtype))
    found, wanted = weights(fp8, dtype), weights(plain, dtype)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], p) for name, p in wanted.items())
    seen = look(str(fp8))
    assert seen.quantization.startswith("FP8 (") and seen.dtype == "bfloat16"
    assert seen.family.parameters == look(str(plain)).family.parameters      # scales are no weights


@pytest.mark.parametrize("scheme", ["block", "channel"])
def test_the_same_tokens_and_embeddings_as_by_hand(checkpoint: Callable[..., str], tmp_path: Path, scheme: str
                                                   ) -> None:
    """By transformers' own generate on the one, by the engine on the other."""
    source = Path(checkpoint("qwen3_vl"))
    fp8, plain = map(str, quantized.build(source, tmp_path, scheme, torch.float32))
    picture = checkpoints.picture(120, 90, 1)
    prompt = pd.prompt(plain, [9, picture, 5], seed=2)
    bench = pd.Bench(fp8, embedded_by=plain)
    bench.submit("x", prompt, max_tokens=12, ignore_eos=True)
    pixels, grid = checkpoints.pixel_values(plain, [picture])
    with torch.inference_mode():
        wanted = checkpoints.whole_model(plain).model.visual(pixels, grid_thw=grid, return_dict=True).pooler_output
        made = load.load_vision(fp8, "float32", "cpu")(pixels, grid_thw=grid, return_dict=True).pooler_output
    assert torch.equal(made, wanted)
    assert bench.run()["x"] == checkpoints.reference_generate(plain, prompt.tokens, [picture], 12)


@pytest.mark.parametrize("kernels", [True, False])
def test_every_number_of_the_format(tmp_path: Path, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 256 bit patterns but the two of NaN, subnormal numbers and both zeros included."""
    if not kernels:
        monkeypatch.setattr(native, "library", lambda: None)
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = bits[(bits & 0x7F) != 0x7F].view(torch.float8_e4m3fn)[None]
    path = tmp_path / "model.safetensors"

    def made(tensor: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        save_file({"a.weight": tensor, "a.weight_scale": torch.tensor([scale])}, path)
        tensors = headers.all_tensors(tmp_path)
        found = quantization.read(tmp_path, {"quantization_config": quantized.compressed("tensor")}, tensors)
        with dequantize.weights(tensors, found, torch.float32, lambda name: True) as state:
            assert state.keys() == {"a.weight"}
            return state["a.weight"]

    assert torch.equal(made(numbers), numbers.float() * 0.5)
    assert torch.equal(made(numbers).signbit(), numbers.float().signbit())
    for nan in (0x7F, 0xFF):
        with pytest.raises(ModelError, match="a.weight holds NaN; download the file again"):
            made(torch.tensor([[0, nan, 1]], dtype=torch.uint8).view(torch.float8_e4m3fn))
    for scale in (math.nan, math.inf):
        with pytest.raises(ModelError, match="a.weight_scale holds NaN or infinity; download the file again"):
            made(numbers, scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", list(quantized.SCHEMES))
def test_without_compiled_kernels_the_same_bits(checkpoint: Callable[..., str], tmp_path: Path, scheme: str, dtype: str,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, plain = quantized.build(Path(checkpoint("qwen3_vl", dtype="bfloat16")), tmp_path, scheme,
                                 getattr(torch, dtype))
    monkeypatch.setattr(native, "library", lambda: None)
    found, wanted = weights(fp8, dtype), weights(plain, dtype)
    assert all(torch.equal(found[name], p) for name, p in wanted.items())


def test_no_second_copy_and_bounded_bands(checkpoint: Callable[..., str], tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader writes into the model's own memory and needs only one more band a thread."""
    fp8, _ = quantized.build(Path(checkpoint("qwen3_vl", dtype="bfloat16")), tmp_path, "block", torch.bfloat16)
    places: dict[int, int] = {}
    fresh = dequantize._fresh

    def remembered(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        made = fresh(rows, columns, dtype)
        places[made.data_ptr()] = made.nbytes
        return made

    monkeypatch.setattr(dequantize, "_fresh", remembered)
    monkeypatch.setattr(dequantize, "BAND", 1000)
    largest: list[int] = []
    read = dequantize._read
    monkeypatch.setattr(dequantize, "_read", lambda tensor, files, into, offset: (
        largest.append(into.size), read(tensor, files, into, offset)))
    language = load.load_language(str(fp8), "bfloat16", "cpu", "sdpa")
    used = {p.data_ptr(): p.nbytes for p in language.parameters() if p.data_ptr() in places}
    assert used == places and len(places) == 2 * 7      # the matrices of two of three layers
    assert max(largest) <= 1000


def test_a_file_that_ends_early_is_named(checkpoint: Callable[..., str], tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after its header was looked at."""
    fp8, _ = quantized.build(Path(checkpoint("qwen3_vl", dtype="bfloat16")), tmp_path, "block", torch.bfloat16)
    path = fp8 / "model.safetensors"
    weights = dequantize.weights

    def cut_first(*args: Any) -> Any:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        return weights(*args)

    monkeypatch.setattr(dequantize, "weights", cut_first)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load.load_language(str(fp8), "bfloat16", "cpu", "sdpa")
