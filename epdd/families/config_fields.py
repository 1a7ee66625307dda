"""Checks, without transformers, that its model classes will accept config.json.

The classes check the types of known fields, but other wrong values fail only when a worker uses them.
"""

from __future__ import annotations

from typing import Any

from epdd.errors import ModelError
from epdd.families.files import Fields
from epdd.families.model_info import AUTO, ITEMSIZE

# A name means the same in every section.  A float must have a decimal point.
WHOLE = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vocab_size",
         "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
         "max_position_embeddings", "depth", "embed_dim", "mlp_ratio", "num_heads", "in_channels", "spatial_merge_size",
         "tokens_per_second", "window_size", "out_hidden_size", "num_position_embeddings", "num_experts",
         "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
WHOLE_OR_NULL = ("num_key_value_heads", "sliding_window", "max_window_layers", "bos_token_id", "pad_token_id")
FLOAT = ("initializer_range", "rms_norm_eps")
FLAG = ("tie_word_embeddings", "use_cache", "attention_bias")
FLAG_OR_NULL = ("use_sliding_window",)
WHOLES = ("fullatt_block_indexes", "deepstack_visual_indexes")
WHOLES_OR_NULL = ("mlp_only_layers",)
OBJECT_OR_NULL = ("id2label", "label2id", "rope_parameters", "rope_scaling")

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu")
ROPE = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")       # "mrope" is an older name of "default"


def check(*sections: Fields) -> None:
    """Fields that mean the same in every section and family.  Raises ModelError naming file and field."""
    for fields in sections:
        _types(fields)
        for key in ("dtype", "torch_dtype"):
            if fields.get(key) not in (None, AUTO, *ITEMSIZE):
                raise fields.wrong(key, "one of " + ", ".join(ITEMSIZE))
        if fields.has("hidden_act") and fields.get("hidden_act") not in ACTIVATIONS:
            raise fields.wrong("hidden_act", "one of " + ", ".join(ACTIVATIONS))


def _types(fields: Fields) -> None:
    for keys, kind, null, wanted in (
            (WHOLE, int, False, "a whole number"), (WHOLE_OR_NULL, int, True, "a whole number or null"),
            (FLOAT, float, False, "a number with a decimal point"), (FLAG, bool, False, "true or false"),
            (FLAG_OR_NULL, bool, True, "true, false or null"), (WHOLES, list, False, "a list of whole numbers"),
            (WHOLES_OR_NULL, list, True, "a list of whole numbers or null"),
            (OBJECT_OR_NULL, dict, True, "an object or null")):
        for key in keys:
            value = fields.get(key)
            if fields.has(key) and type(value) is not kind and not (null and value is None):
                raise fields.wrong(key, wanted)
    for key in (*WHOLES, *WHOLES_OR_NULL):
        fields.wholes(key)
    for key in ("patch_size", "temporal_patch_size"):
        if fields.has(key) and not _side(fields.get(key)):
            raise fields.wrong(key, "a whole number")
    if fields.get("attention_dropout", 0.0) != 0:
        _number(fields, "attention_dropout")


def _side(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(type(item) is int and item > 0 for item in values)


def full_attention(text: Fields) -> None:
    """Raises ModelError if a layer has another kind of attention, such as a sliding window."""
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


def theta(fields: Fields) -> None:
    """Raises ModelError if rope_theta is there and is no number over 0."""
    if fields.has("rope_theta"):
        _number(fields, "rope_theta")


def _number(fields: Fields, key: str) -> None:
    if type(fields.get(key)) not in (int, float) or fields.get(key) <= 0:
        raise fields.wrong(key, "a number over 0")
