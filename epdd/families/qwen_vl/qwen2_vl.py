"""Qwen2-VL."""

from __future__ import annotations

import re
from collections.abc import Iterator

from epdd.families.config_fields import ROPE
from epdd.families.files import Fields
from epdd.families.qwen_vl.base import VISION, QwenVL
from epdd.families.tensors import Named, Sizes, linear, norm


class Qwen2VL(QwenVL):
    """A tower of layer norms and two linear layers a block; biases on queries, keys and values."""

    model_type = "qwen2_vl"
    text_defaults = {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
                     "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064}
    vision_defaults = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "in_channels": 3,
                       "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16}
    sections = [16, 24, 24]
    rope_types = (*ROPE, "mrope")       # "mrope" is an older name of "default"
    width_key, out_key = "embed_dim", "hidden_size"

    def canonical(self, name: str) -> str:
        name = re.sub(r"^visual", "model.visual", name)
        return re.sub(r"^model(?!\.(language_model|visual))", "model.language_model", name)

    def tied(self, config: Fields, text: Fields) -> bool:
        # transformers reads it in text_config too.
        return super().tied(config, text) or text.flag("tie_word_embeddings", False)

    def vision(self, vision: Fields) -> Iterator[Named]:
        size = Sizes(vision, self.vision_defaults)
        width = size(self.width_key)
        wide = width * size("spatial_merge_size") ** 2
        yield VISION + "patch_embed.proj.weight", self.patch_shape(size)
        for block in range(size("depth")):
            at = f"{VISION}blocks.{block}."
            yield from self.norm(at + "norm1", width)
            yield from self.norm(at + "norm2", width)
            yield from linear(at + "attn.qkv", 3 * width, width)
            yield from linear(at + "attn.proj", width, width)
            yield from self.vision_feed_forward(at + "mlp.", width, size)
        yield from self.norm(VISION + "merger.ln_q", width)
        yield from linear(VISION + "merger.mlp.0", wide, wide)
        yield from linear(VISION + "merger.mlp.2", size(self.out_key), wide)

    def norm(self, name: str, width: int) -> Iterator[Named]:
        """A norm of the tower."""
        return norm(name, width)

    def vision_feed_forward(self, at: str, width: int, size: Sizes) -> Iterator[Named]:
        """Of one block of the tower."""
        inner = width * size("mlp_ratio")
        yield from linear(at + "fc1", inner, width)
        yield from linear(at + "fc2", width, inner)
