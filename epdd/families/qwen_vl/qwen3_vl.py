"""Qwen3-VL."""

from __future__ import annotations

from collections.abc import Iterator

from epdd.families.files import Fields
from epdd.families.qwen_vl.base import VISION, QwenVL
from epdd.families.tensors import Named, Sizes, linear, norm

DEEPSTACK = [8, 16, 24]         # transformers' default


class Qwen3VL(QwenVL):
    """Deepstack levels beside each image token, norms on queries and keys, heads of a size of their own."""

    model_type = "qwen3_vl"
    text_defaults = {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 151936, "head_dim": 128}
    vision_defaults = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "in_channels": 3, "patch_size": 16,
                       "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
                       "num_position_embeddings": 2304, "num_heads": 16}
    sections = [24, 20, 20]
    head_norms = ("q_norm", "k_norm")

    def head_size(self, text: Fields) -> int:
        return Sizes(text, self.text_defaults)("head_dim")

    def biased(self, text: Fields) -> str:
        return "qkvo" if text.flag("attention_bias", False) else ""

    def vision(self, vision: Fields) -> Iterator[Named]:
        size = Sizes(vision, self.vision_defaults)
        width, out, inner = size(self.width_key), size(self.out_key), size("intermediate_size")
        wide = width * size("spatial_merge_size") ** 2
        yield VISION + "patch_embed.proj.weight", self.patch_shape(size)
        yield VISION + "patch_embed.proj.bias", (width,)
        yield VISION + "pos_embed.weight", (size("num_position_embeddings"), width)
        for block in range(size("depth")):
            at = f"{VISION}blocks.{block}."
            yield from norm(at + "norm1", width)
            yield from norm(at + "norm2", width)
            yield from linear(at + "attn.qkv", 3 * width, width)
            yield from linear(at + "attn.proj", width, width)
            yield from linear(at + "mlp.linear_fc1", inner, width)
            yield from linear(at + "mlp.linear_fc2", width, inner)
        levels = len(DEEPSTACK if vision.get("deepstack_visual_indexes") is None else
                     vision.wholes("deepstack_visual_indexes"))
        for at, normed in (("merger.", width), *((f"deepstack_merger_list.{i}.", wide) for i in range(levels))):
            yield from norm(VISION + at + "norm", normed)
            yield from linear(VISION + at + "linear_fc1", wide, wide)
            yield from linear(VISION + at + "linear_fc2", out, wide)
