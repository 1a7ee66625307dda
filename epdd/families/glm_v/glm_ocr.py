"""GLM-OCR."""

from __future__ import annotations

import re
from collections.abc import Iterator

from epdd.families.files import Fields
from epdd.families.glm_v.base import GlmV
from epdd.families.tensors import HARMLESS, Named, Sizes


class GlmOcr(GlmV):
    """Norms on queries and keys in the tower, no table of positions, heads of a size of their own."""

    model_type = "glm_ocr"
    text_defaults = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
                     "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 59392}
    vision_defaults = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "in_channels": 3,
                       "image_size": 336, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
                       "out_hidden_size": 1536, "num_heads": 16}
    vision_biased = True
    biased_parts = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    # Layer 16 of the published checkpoint predicts several tokens at once, and transformers ignores it too.
    ignored = re.compile(HARMLESS.pattern + r"|^model\.language_model\.layers\.16\.")

    def head_size(self, text: Fields) -> int:
        return text.whole("head_dim", 0) or super().head_size(text)

    def biased(self, text: Fields) -> str:
        return ""

    def block(self, width: int, size: Sizes) -> Iterator[Named]:
        head = width // size("num_heads")
        yield from super().block(width, size)
        yield "attn.q_norm", (head,)
        yield "attn.k_norm", (head,)

    def vision_inner(self, size: Sizes) -> int:
        return size("intermediate_size")

    def merger_width(self, size: Sizes) -> int:
        return size("out_hidden_size") * size("in_channels")
