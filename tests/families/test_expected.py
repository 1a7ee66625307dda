"""The expected tensors of a folder against those of transformers' model classes."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from epdd import families
from epdd.errors import ModelError
from epdd.families.files import Fields
from epdd.families.tensors import Expected

HUB = {     # as published: missing fields have defaults
    "qwen2_vl": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 28,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
                          "hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}},
    "qwen2_5_vl": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584, "in_chans": 3, "window_size": 112}},
    "qwen3_vl": {
        "text_config": {"attention_bias": True, "head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728,
                        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
                        "vocab_size": 151936, "rope_theta": 5e6, "tie_word_embeddings": True,
                        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
                                         "rope_type": "default"}},
        "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560,
                          "deepstack_visual_indexes": [5, 11, 17]}, "tie_word_embeddings": True},
    "qwen3_vl_moe": {
        "text_config": {"attention_bias": False, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
                        "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128,
                        "num_experts_per_tok": 8, "num_hidden_layers": 4, "num_key_value_heads": 4,
                        "decoder_sparse_step": 1, "mlp_only_layers": [1], "vocab_size": 151936, "rope_theta": 5e6,
                        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
                                         "rope_type": "default"}},
        "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 2048,
                          "deepstack_visual_indexes": [8, 16, 24]}, "tie_word_embeddings": False},
}


def of_transformers(folder: Path) -> dict[str, tuple[int, ...]]:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def write(folder: Path, kind: str, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    return folder


def of(folder: Path) -> Expected:
    return families.at(folder).expected(Fields(folder / "config.json"))


def check(folder: Path) -> None:
    families.at(folder).check(Fields(folder / "config.json"))


@pytest.mark.parametrize("kind", HUB)
@pytest.mark.parametrize("bare", [False, True])
def test_names_and_shapes_are_those_of_the_model_classes(tmp_path: Path, kind: str, bare: bool) -> None:
    text = HUB[kind].get("text_config", HUB[kind])
    few = {"num_hidden_layers": 2, "rope_scaling": text["rope_scaling"]}
    config = HUB[kind] if not bare else {"text_config": few, "vision_config": {}}
    folder = write(tmp_path, kind, config)
    found = of(folder)
    theirs = of_transformers(folder)
    assert found.shapes.keys() == theirs.keys()
    assert [name for name, shape in theirs.items() if not found.fits(name, shape)] == []
    assert {name for name in theirs if found.shapes[name] != theirs[name]} <= found.either_way
    assert found.tied == transformers.AutoConfig.from_pretrained(folder).tie_word_embeddings


@pytest.mark.parametrize("kind", HUB)
def test_published_settings_are_taken_and_each_wrong_field_is_named(tmp_path: Path, kind: str) -> None:
    check(write(tmp_path, kind, HUB[kind]))
    for part, field, value in (("vision_config", "num_heads", 17), ("vision_config", "depth", None),
                               ("text", "hidden_act", "epdd"), ("text", "rms_norm_eps", 1), ("text", "rope_theta", "x"),
                               ("text", "num_key_value_heads", 5), ("text", "attention_dropout", "x")):
        config = json.loads(json.dumps(HUB[kind]))
        section = config.get("text_config", config) if part == "text" else config[part]
        section[field] = value
        with pytest.raises(ModelError, match=f"config.json: .*{field} is "):
            check(write(tmp_path, kind, config))


@pytest.mark.parametrize("kind", HUB)
def test_where_the_language_models_tying_is_said(tmp_path: Path, kind: str) -> None:
    config = json.loads(json.dumps(HUB[kind]))
    text = config.pop("text_config", None) or {key: config.pop(key) for key in list(config) if key != "vision_config"}
    config.pop("tie_word_embeddings", None)
    folder = write(tmp_path, kind, {**config, "text_config": {**text, "tie_word_embeddings": True}})
    tied = transformers.AutoConfig.from_pretrained(folder).tie_word_embeddings
    assert of(folder).tied == tied


@pytest.mark.parametrize("kind", HUB)
def test_the_layouts_of_all_times_have_the_same_names(checkpoint, kind: str) -> None:
    from safetensors import safe_open
    folder = Path(checkpoint(kind))
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    wanted = set(of(folder).shapes)
    family = families.at(folder)
    assert {family.canonical(name) for name in stored} == wanted
    assert {family.canonical(name) for name in wanted} == wanted
