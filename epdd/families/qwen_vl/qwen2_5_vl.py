"""Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Iterator

from epdd.families.qwen_vl.qwen2_vl import Qwen2VL
from epdd.families.tensors import Named, Sizes, linear


class Qwen2_5VL(Qwen2VL):
    """Qwen2-VL's language model; a tower with windows, RMS norms and a gated feed-forward part."""

    model_type = "qwen2_5_vl"
    vision_defaults = {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "in_channels": 3, "patch_size": 14,
                       "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584, "num_heads": 16}
    width_key, out_key = "hidden_size", "out_hidden_size"

    def norm(self, name: str, width: int) -> Iterator[Named]:
        yield name + ".weight", (width,)

    def vision_feed_forward(self, at: str, width: int, size: Sizes) -> Iterator[Named]:
        inner = size("intermediate_size")
        yield from linear(at + "gate_proj", inner, width)
        yield from linear(at + "up_proj", inner, width)
        yield from linear(at + "down_proj", width, inner)
