"""Names and shapes of the tensors that a checkpoint must have, computed from config.json.

Names are those that transformers 5 loads.  Names of older layouts are translated as transformers does at loading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from epdd.families.files import Fields
from epdd.families.model_info import text_fields

# In every layout of every family the vision tower is called "visual".  All other tensors are the language model's.
OF_VISION = r"\bvisual\."
VISION, LANGUAGE = "model.visual.", "model.language_model."
HEAD, EMBEDDING = "lm_head.weight", LANGUAGE + "embed_tokens.weight"

TensorShape = tuple[int, ...]
Named = tuple[str, TensorShape]

# Tensors that some checkpoints have and epdd ignores: rotary tables, which are computed from the settings, and layers
# for multi-token prediction.
HARMLESS = re.compile(r"(^|\.)(rotary_emb|rotary_pos_emb)\.inv_freq$|^(model\.)?mtp\.")

# transformers' defaults for fields that config.json leaves out.
_QWEN2_TEXT = {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
               "num_key_value_heads": 8, "vocab_size": 152064}
TEXT_DEFAULTS = {
    "qwen2_vl": _QWEN2_TEXT, "qwen2_5_vl": _QWEN2_TEXT,
    "qwen3_vl": {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 32, "vocab_size": 151936, "head_dim": 128}}
VISION_DEFAULTS = {
    "qwen2_vl": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "in_channels": 3,
                 "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16},
    "qwen2_5_vl": {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "in_channels": 3, "patch_size": 14,
                   "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584, "num_heads": 16},
    "qwen3_vl": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "in_channels": 3, "patch_size": 16,
                 "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
                 "num_position_embeddings": 2304, "num_heads": 16}}
DEEPSTACK = [8, 16, 24]


@dataclass(frozen=True)
class Expected:
    """`tied`: HEAD and EMBEDDING are the same matrix, so one of them may be missing."""

    shapes: dict[str, TensorShape]
    tied: bool


def expected(config: Fields) -> Expected:
    """Tensors of a checkpoint with this config.json.  Raises ModelError for a field that is not a size."""
    kind = str(config.get("model_type"))
    text, vision = text_fields(config), config.part("vision_config")
    tied = config.flag("tie_word_embeddings", False)
    if kind != "qwen3_vl":      # transformers reads it in text_config too
        tied = tied or text.flag("tie_word_embeddings", False)
    return Expected(dict([*_language(kind, text), *_vision(kind, vision)]), tied)


def canonical(kind: str, name: str) -> str:
    """The name under which transformers loads a tensor, from its name in any layout of the family."""
    if kind == "qwen3_vl":
        return name
    name = re.sub(r"^visual", "model.visual", name)
    return re.sub(r"^model(?!\.(language_model|visual))", "model.language_model", name)


def is_vision(name: str) -> bool:
    """Whether a tensor stored under this name belongs to the vision tower."""
    return re.search(OF_VISION, name) is not None


def _language(kind: str, text: Fields) -> Iterator[Named]:
    size = _Sizes(text, TEXT_DEFAULTS[kind])
    hidden, inner, heads = size("hidden_size"), size("intermediate_size"), size("num_attention_heads")
    head = size("head_dim") if kind == "qwen3_vl" else hidden // heads
    queries, keys = heads * head, text.whole("num_key_value_heads", size.absent("num_key_value_heads", heads),
                                             least=1) * head
    biased = ("q", "k", "v") if kind != "qwen3_vl" else (
        ("q", "k", "v", "o") if text.flag("attention_bias", False) else ())
    yield EMBEDDING, (size("vocab_size"), hidden)
    yield HEAD, (size("vocab_size"), hidden)
    yield LANGUAGE + "norm.weight", (hidden,)
    for layer in range(size("num_hidden_layers")):
        at = f"{LANGUAGE}layers.{layer}."
        for name, shape in (("q", (queries, hidden)), ("k", (keys, hidden)), ("v", (keys, hidden)),
                            ("o", (hidden, queries))):
            yield f"{at}self_attn.{name}_proj.weight", shape
            if name in biased:
                yield f"{at}self_attn.{name}_proj.bias", shape[:1]
        if kind == "qwen3_vl":
            yield at + "self_attn.q_norm.weight", (head,)
            yield at + "self_attn.k_norm.weight", (head,)
        yield at + "mlp.gate_proj.weight", (inner, hidden)
        yield at + "mlp.up_proj.weight", (inner, hidden)
        yield at + "mlp.down_proj.weight", (hidden, inner)
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "post_attention_layernorm.weight", (hidden,)


def _vision(kind: str, vision: Fields) -> Iterator[Named]:
    size = _Sizes(vision, VISION_DEFAULTS[kind])
    width = size("embed_dim" if kind == "qwen2_vl" else "hidden_size")
    out = size("hidden_size" if kind == "qwen2_vl" else "out_hidden_size")
    inner = width * size("mlp_ratio") if kind == "qwen2_vl" else size("intermediate_size")
    wide = width * size("spatial_merge_size") ** 2
    patch = (width, size("in_channels"), size.side("temporal_patch_size"), *[size.side("patch_size")] * 2)
    yield VISION + "patch_embed.proj.weight", patch
    if kind == "qwen3_vl":
        yield VISION + "patch_embed.proj.bias", (width,)
        yield VISION + "pos_embed.weight", (size("num_position_embeddings"), width)
    for block in range(size("depth")):
        at = f"{VISION}blocks.{block}."
        yield from _norm(at + "norm1", width, kind)
        yield from _norm(at + "norm2", width, kind)
        yield from _linear(at + "attn.qkv", 3 * width, width)
        yield from _linear(at + "attn.proj", width, width)
        if kind == "qwen2_5_vl":
            yield from _linear(at + "mlp.gate_proj", inner, width)
            yield from _linear(at + "mlp.up_proj", inner, width)
            yield from _linear(at + "mlp.down_proj", width, inner)
        else:
            first, second = ("fc1", "fc2") if kind == "qwen2_vl" else ("linear_fc1", "linear_fc2")
            yield from _linear(at + f"mlp.{first}", inner, width)
            yield from _linear(at + f"mlp.{second}", width, inner)
    if kind != "qwen3_vl":
        yield from _norm(VISION + "merger.ln_q", width, kind)
        yield from _linear(VISION + "merger.mlp.0", wide, wide)
        yield from _linear(VISION + "merger.mlp.2", out, wide)
        return
    planes = len(DEEPSTACK if vision.get("deepstack_visual_indexes") is None else
                 vision.wholes("deepstack_visual_indexes"))
    for at, normed in (("merger.", width), *((f"deepstack_merger_list.{i}.", wide) for i in range(planes))):
        yield from _norm(VISION + at + "norm", normed, kind)
        yield from _linear(VISION + at + "linear_fc1", wide, wide)
        yield from _linear(VISION + at + "linear_fc2", out, wide)


def _linear(name: str, outs: int, ins: int) -> Iterator[Named]:
    yield name + ".weight", (outs, ins)
    yield name + ".bias", (outs,)


def _norm(name: str, width: int, kind: str) -> Iterator[Named]:
    yield name + ".weight", (width,)
    if kind != "qwen2_5_vl":        # its norms are RMS norms
        yield name + ".bias", (width,)


class _Sizes:
    """Sizes from one section of config.json, with transformers' defaults."""

    def __init__(self, fields: Fields, defaults: dict[str, int]) -> None:
        self._fields, self._defaults = fields, defaults

    def __call__(self, key: str) -> int:
        return self._fields.whole(key, self._defaults[key], least=1)

    def absent(self, key: str, null: int) -> int:
        """Value of a missing field if null has another meaning, `null`."""
        return null if self._fields.has(key) else self._defaults[key]

    def side(self, key: str) -> int:
        """A size that may be written as a list of equal sizes."""
        value: Any = self._fields.get(key)
        if isinstance(value, list) and len(set(map(str, value))) == 1 and isinstance(value[0], int):
            return value[0]
        return self(key)
