from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from epdd.errors import ModelError
from epdd.worker.weights import load
from tests.models import checkpoints

VARIANTS = [{}, {"shards": 3}, {"tie": True}]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_the_halves_are_disjoint_and_whole_together(checkpoint: Callable[..., str], family: str,
                                                    variant: dict[str, object]) -> None:
    folder = checkpoint(family, **variant)
    assert (len(list(Path(folder).glob("*.safetensors"))) > 1) == ("shards" in variant)
    vision = load.load_vision(folder, "auto", "cpu")
    language = load.load_language(folder, "auto", "cpu", "sdpa")
    whole = checkpoints.whole_model(folder)
    assert not [name for name, _ in language.named_parameters() if "visual" in name]
    parts = {f"model.visual.{name}": p for name, p in vision.named_parameters()} | dict(language.named_parameters())
    wanted = dict(whole.named_parameters())
    assert parts.keys() == wanted.keys()
    assert all(torch.equal(parts[name], p) for name, p in wanted.items())
    for half in (vision, language):
        assert not [n for n, t in [*half.named_parameters(), *half.named_buffers()] if t.is_meta or t.requires_grad]


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_divided_logits_equal_undivided_ones(checkpoint: Callable[..., str], family: str) -> None:
    folder = checkpoint(family)
    whole, language = checkpoints.whole_model(folder), load.load_language(folder, "auto", "cpu", "sdpa")
    ids = torch.arange(1, 60)[None]
    with torch.inference_mode():
        assert torch.equal(language(input_ids=ids).logits, whole(input_ids=ids).logits)


@pytest.mark.parametrize("half, loader", [("visual", lambda d: load.load_vision(d, "auto", "cpu")),
                                          ("language_model", lambda d: load.load_language(d, "auto", "cpu", "sdpa"))])
def test_a_missing_weight_is_named(checkpoint: Callable[..., str], tmp_path: Path, half: str,
                                   loader: Callable[[str], object]) -> None:
    source = Path(checkpoint("qwen3_vl"))
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    victim = next(name for name in weights if half in name)
    del weights[victim]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="missing"):
        loader(str(tmp_path))


def test_damaged_checkpoints_are_model_errors(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load.load_vision(str(tmp_path), "auto", "cpu")
    for path in Path(checkpoint("qwen3_vl")).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    cut = tmp_path / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    with pytest.raises(ModelError):
        load.load_vision(str(tmp_path), "auto", "cpu")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with pytest.raises(ModelError):
        load.load_language(str(tmp_path), "auto", "cpu", "sdpa")


def test_pickled_weights_are_never_read(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    for path in Path(checkpoint("qwen3_vl")).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="only as PyTorch .bin files"):
        load.load_vision(str(tmp_path), "auto", "cpu")


def test_auto_dtype_follows_checkpoint_and_cpu(checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    bf16, f16, f32 = (checkpoint("qwen3_vl", dtype=kind) for kind in ("bfloat16", "float16", "float32"))
    for fast in (False, True):
        monkeypatch.setattr(load, "_cpu_has_fast_bfloat16", lambda fast=fast: fast)
        assert load.pick_dtype(bf16, "auto", "cpu") is (torch.bfloat16 if fast else torch.float32)
        assert load.pick_dtype(f16, "auto", "cpu") is load.pick_dtype(f32, "auto", "cpu") is torch.float32
    assert load.pick_dtype(bf16, "float32", "cpu") is torch.float32
    assert load.pick_dtype(f32, "float16", "cpu") is torch.float32
    assert load.load_vision(f16, "auto", "cpu").dtype is torch.float32


def test_weights_of_the_kept_type_stay_file_pages(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    vision = load.load_vision(folder, "auto", "cpu")
    address = vision.blocks[0].attn.qkv.weight.data_ptr()
    with open("/proc/self/maps") as file:
        for line in file:
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            if start <= address < end:
                assert "model.safetensors" in line
                return
    pytest.fail("the weight is not mapped at all")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_published_checkpoints_of_the_older_layout_load(checkpoint: Callable[..., str], tmp_path: Path,
                                                        family: str) -> None:
    """Names and config as Qwen published them before transformers 4.52: no prefix, text fields at the top."""
    source = Path(checkpoint(family))
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    old = {name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
           for name, tensor in weights.items()}
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    text["rope_theta"] = 1e6
    (tmp_path / "config.json").write_text(json.dumps(text | config))
    vision = load.load_vision(str(tmp_path), "auto", "cpu")
    language = load.load_language(str(tmp_path), "auto", "cpu", "sdpa")
    whole = checkpoints.whole_model(str(source))
    assert all(torch.equal(p, dict(whole.model.visual.named_parameters())[n]) for n, p in vision.named_parameters())
    ids = torch.arange(1, 60)[None]
    with torch.inference_mode():
        assert torch.equal(language(input_ids=ids).logits, whole(input_ids=ids).logits)
