"""Checks, without transformers, that its model classes will accept config.json.

The classes check the types of known fields, but other wrong values fail only when a worker uses them.
"""

from __future__ import annotations

import json
from typing import Any

from epdd.checkpoint.expected import TEXT_DEFAULTS, VISION_DEFAULTS
from epdd.errors import ModelError
from epdd.families import ITEMSIZE
from epdd.families.files import Fields
from epdd.families.model_info import AUTO, text_fields

# A name means the same in every section.  A float must have a decimal point.
WHOLE = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vocab_size",
         "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
         "max_position_embeddings", "depth", "embed_dim", "mlp_ratio", "num_heads", "in_channels", "spatial_merge_size",
         "tokens_per_second", "window_size", "out_hidden_size", "num_position_embeddings")
WHOLE_OR_NULL = ("num_key_value_heads", "sliding_window", "max_window_layers", "bos_token_id", "pad_token_id")
FLOAT = ("initializer_range", "rms_norm_eps")
FLAG = ("tie_word_embeddings", "use_cache", "attention_bias")
FLAG_OR_NULL = ("use_sliding_window",)
WHOLES = ("fullatt_block_indexes", "deepstack_visual_indexes")
OBJECT_OR_NULL = ("id2label", "label2id", "rope_parameters", "rope_scaling")

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu")
ROPE = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")       # "mrope" is an older name of "default"
SECTIONS = {"qwen2_vl": [16, 24, 24], "qwen2_5_vl": [16, 24, 24], "qwen3_vl": [24, 20, 20]}


def check(config: Fields) -> None:
    """Raises ModelError naming file and field."""
    kind = str(config.get("model_type"))
    text, vision = text_fields(config), config.part("vision_config")
    for fields in (config, text, vision):
        _types(fields)
        for key in ("dtype", "torch_dtype"):
            if fields.get(key) not in (None, AUTO, *ITEMSIZE):
                raise fields.wrong(key, "one of " + ", ".join(ITEMSIZE))
        if fields.has("hidden_act") and fields.get("hidden_act") not in ACTIVATIONS:
            raise fields.wrong("hidden_act", "one of " + ", ".join(ACTIVATIONS))
    name = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    rows, hidden = (fields.whole(key, defaults[kind][key]) for fields, key, defaults in (
        (vision, name, VISION_DEFAULTS), (text, "hidden_size", TEXT_DEFAULTS)))
    if rows != hidden:
        raise ModelError(f"{config.path}: vision_config.{name} is {rows}, but the language model's hidden_size is "
                         f"{hidden}; take the file of the original checkpoint")
    _heads(kind, text, vision)
    _attention(text)
    _text_rope(kind, text)
    if vision.get("rope_parameters") is not None:
        rope = vision.part("rope_parameters")
        if rope.has("rope_type") and rope.get("rope_type") != "axial":
            raise rope.wrong("rope_type", '"axial"')
        _theta(rope)


def _types(fields: Fields) -> None:
    for keys, kind, null, wanted in (
            (WHOLE, int, False, "a whole number"), (WHOLE_OR_NULL, int, True, "a whole number or null"),
            (FLOAT, float, False, "a number with a decimal point"), (FLAG, bool, False, "true or false"),
            (FLAG_OR_NULL, bool, True, "true, false or null"), (WHOLES, list, False, "a list of whole numbers"),
            (OBJECT_OR_NULL, dict, True, "an object or null")):
        for key in keys:
            value = fields.get(key)
            if fields.has(key) and type(value) is not kind and not (null and value is None):
                raise fields.wrong(key, wanted)
    for key in WHOLES:
        fields.wholes(key)
    for key in ("patch_size", "temporal_patch_size"):
        if fields.has(key) and not _side(fields.get(key)):
            raise fields.wrong(key, "a whole number")
    if fields.get("attention_dropout", 0.0) != 0:
        _number(fields, "attention_dropout")


def _side(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(type(item) is int and item > 0 for item in values)


def _heads(kind: str, text: Fields, vision: Fields) -> None:
    """Heads must divide the width.  In the vision tower the size of a head must be a multiple of 4 as well."""
    sizes, width = VISION_DEFAULTS[kind], "embed_dim" if kind == "qwen2_vl" else "hidden_size"
    if vision.whole(width, sizes[width], least=1) % (4 * vision.whole("num_heads", sizes["num_heads"], least=1)):
        raise vision.wrong("num_heads", f"a number whose fourfold divides {width}")
    sizes = TEXT_DEFAULTS[kind]
    heads = text.whole("num_attention_heads", sizes["num_attention_heads"], least=1)
    if kind != "qwen3_vl" and text.whole("hidden_size", sizes["hidden_size"], least=1) % (2 * heads):
        raise text.wrong("num_attention_heads", "a number whose double divides hidden_size")
    absent = heads if text.has("num_key_value_heads") else sizes["num_key_value_heads"]
    if heads % text.whole("num_key_value_heads", absent, least=1):
        raise text.wrong("num_key_value_heads", f"a number that divides num_attention_heads, {heads},")


def _attention(text: Fields) -> None:
    """epdd serves only full attention, without sliding windows."""
    kinds = text.get("layer_types")
    layers = text.whole("num_hidden_layers", 1)
    if kinds is None:
        windows = text.get("use_sliding_window") and text.get("sliding_window", 4096) is not None
        kinds = ["sliding_attention"] if windows and (text.get("max_window_layers", 80) or 0) < layers else []
    elif not isinstance(kinds, list) or len(kinds) != layers:
        raise text.wrong("layer_types", "null, or one kind for each layer")
    if other := sorted({str(each) for each in kinds} - {"full_attention"}):
        raise ModelError(f"{text.path}: attention of kind {', '.join(other)} is not served (layer_types, "
                         "use_sliding_window); take a checkpoint with full attention")


def _text_rope(kind: str, text: Fields) -> None:
    """Rotary positions have three sections: time, height and width."""
    key = next((key for key in ("rope_scaling", "rope_parameters") if text.get(key)), None)
    rope = None if key is None else text.part(key)
    section: Any = SECTIONS[kind]
    if rope is not None:
        known = ROPE if kind == "qwen3_vl" else (*ROPE, "mrope")
        for name in ("rope_type", "type"):
            if rope.has(name) and rope.get(name) not in known:
                raise rope.wrong(name, "one of " + ", ".join(known))
        _theta(rope)
        section = rope.get("mrope_section", section)
    _theta(text)
    defaults = TEXT_DEFAULTS[kind]
    head = text.whole("head_dim", defaults["head_dim"]) if kind == "qwen3_vl" else (
        text.whole("hidden_size", defaults["hidden_size"])
        // text.whole("num_attention_heads", defaults["num_attention_heads"], least=1))
    sizes = isinstance(section, list) and len(section) == 3 and all(type(item) is int and item > 0 for item in section)
    if not sizes or 2 * sum(section) != head:
        have = "is missing" if rope is None or not rope.has("mrope_section") else f"is {json.dumps(section)[:80]}"
        raise ModelError(f"{text.path}: mrope_section {have}; three numbers are expected whose sum is half of a head's "
                         f"size, {head}")


def _theta(fields: Fields) -> None:
    if fields.has("rope_theta"):
        _number(fields, "rope_theta")


def _number(fields: Fields, key: str) -> None:
    if type(fields.get(key)) not in (int, float) or fields.get(key) <= 0:
        raise fields.wrong(key, "a number over 0")
