"""GLM-4.1V."""

from __future__ import annotations

from collections.abc import Iterator

from epdd.families.files import Fields
from epdd.families.glm_v.base import GlmV
from epdd.families.qwen_vl.base import VISION
from epdd.families.tensors import Named, Sizes


class Glm4V(GlmV):
    """A tower with a table of positions that is interpolated; biases on queries, keys and values."""

    model_type = "glm4v"
    text_defaults = {"hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
                     "num_attention_heads": 32, "num_key_value_heads": 2, "vocab_size": 151552}
    vision_defaults = {"depth": 24, "hidden_size": 1536, "intermediate_size": 13696, "in_channels": 3,
                       "image_size": 336, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
                       "out_hidden_size": 4096, "num_heads": 12}

    def head_size(self, text: Fields) -> int:
        size = super().head_size(text)
        if text.whole("head_dim", size) != size:
            raise text.wrong("head_dim", f"hidden_size divided by num_attention_heads, {size},")
        return size

    def positions(self, vision: Fields, size: Sizes) -> Iterator[Named]:
        width = size("hidden_size")
        yield VISION + "embeddings.position_embedding.weight", (
            (size("image_size") // size.side("patch_size")) ** 2, width)
        yield VISION + "post_conv_layernorm.weight", (width,)
