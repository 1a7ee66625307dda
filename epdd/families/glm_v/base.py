"""What the GLM-V families share: limits on pixels that count both frames of a still, and four norms a layer.

Otherwise they are built like the Qwen-VL families: patches, M-RoPE, a language model with full attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from epdd.errors import MediaError, ModelError
from epdd.families.files import Fields
from epdd.families.image_tokens import Grid
from epdd.families.model_info import ASPECT_MAX, ModelInfo
from epdd.families.processor import ProcessorRule
from epdd.families.qwen_vl.base import VISION, QwenVL
from epdd.families.tensors import Named, Sizes


class GlmInfo(ModelInfo):
    """Facts of a GLM-V checkpoint."""

    def grid(self, width: int, height: int, min_pixels: int = 0, max_pixels: int = 0) -> Grid:
        """As of ModelInfo; the limits are for the pixels of all frames, and a side below one image token is scaled up
        before the aspect ratio is checked."""
        low, high = min_pixels or self.min_pixels, max_pixels or self.max_pixels
        factor, frames = self.patch * self.merge, self.temporal
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(width, height) > ASPECT_MAX * min(width, height):
            raise MediaError(f"one side of the image is over {ASPECT_MAX} times the other ({width} x {height})")
        rows, columns = (round(side / factor) * factor for side in (height, width))
        if frames * rows * columns > high:
            scale = math.sqrt((frames * height * width) / high)
            rows, columns = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
        elif frames * rows * columns < low:
            scale = math.sqrt(low / (frames * height * width))
            rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return 1, rows // self.patch, columns // self.patch

    @property
    def rows_max(self) -> int:
        return max(1, self.max_pixels // (self.temporal * (self.patch * self.merge) ** 2))


class GlmV(QwenVL):
    """One of them."""

    fast_tower = False
    info_type = GlmInfo
    template_keys = ("image_start_token_id", "image_token_id", "image_end_token_id")
    rule = ProcessorRule(
        ("Glm4vImageProcessor", "Glm4vImageProcessorFast", "Glm4vImageProcessorPil", "Glm46VImageProcessor",
         "Glm46VImageProcessorFast", "Glm46VImageProcessorPil"),
        min_pixels=112 * 112, max_pixels=28 * 28 * 15000, size_only=True)
    sections = [8, 12, 12]
    layer_norms = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")

    def rotary_size(self, text: Fields) -> int:
        """A share of each head, which older files have beside the other settings."""
        rope = text.part("rope_parameters") if text.get("rope_parameters") else text
        share = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", 1.0))
        return int(self.head_size(text) * share)

    def tied(self, config: Fields, text: Fields) -> bool:
        # transformers reads it in text_config too.
        return super().tied(config, text) or text.flag("tie_word_embeddings", False)

    def check(self, config: Fields) -> None:
        super().check(config)
        vision = config.part("vision_config")
        if vision.get("hidden_act") not in (None, "silu"):
            raise vision.wrong("hidden_act", '"silu"')
        vision.whole("image_size", 336, least=1)
        theta = vision.get("rope_parameters")
        if isinstance(theta, dict) and theta.get("rope_theta") is None and theta:
            raise ModelError(f"{config.path}: vision_config.rope_parameters lacks rope_theta; take the file of the "
                             "original checkpoint")

    def feed_forward(self, at: str, layer: int, text: Fields, size: Sizes) -> Iterator[Named]:
        hidden, inner = size("hidden_size"), size("intermediate_size")
        yield at + "gate_up_proj.weight", (2 * inner, hidden)
        yield at + "down_proj.weight", (hidden, inner)

    def vision(self, vision: Fields) -> Iterator[Named]:
        size = Sizes(vision, self.vision_defaults)
        width, out = size("hidden_size"), size("out_hidden_size")
        biased = vision.flag("attention_bias", self.vision_biased)
        yield VISION + "patch_embed.proj.weight", self.patch_shape(size)
        yield VISION + "patch_embed.proj.bias", (width,)
        yield from self.positions(vision, size)
        for block in range(size("depth")):
            at = f"{VISION}blocks.{block}."
            yield at + "norm1.weight", (width,)
            yield at + "norm2.weight", (width,)
            for name, shape in self.block(width, size):
                yield f"{at}{name}.weight", shape
                if biased and (name in self.biased_parts):
                    yield f"{at}{name}.bias", shape[:1]
        yield VISION + "post_layernorm.weight", (width,)
        yield VISION + "downsample.weight", (out, width, *[size("spatial_merge_size")] * 2)
        yield VISION + "downsample.bias", (out,)
        yield VISION + "merger.proj.weight", (out, out)
        yield VISION + "merger.post_projection_norm.weight", (out,)
        yield VISION + "merger.post_projection_norm.bias", (out,)
        inner = self.merger_width(size)
        yield VISION + "merger.gate_proj.weight", (inner, out)
        yield VISION + "merger.up_proj.weight", (inner, out)
        yield VISION + "merger.down_proj.weight", (out, inner)

    vision_biased = False                           # if attention_bias is missing
    biased_parts: tuple[str, ...] = ("attn.qkv",)   # of a block, if attention_bias is set

    def positions(self, vision: Fields, size: Sizes) -> Iterator[Named]:
        """Of the patches' positions."""
        yield from ()

    def block(self, width: int, size: Sizes) -> Iterator[Named]:
        """Matrices of one block of the tower, without ".weight"."""
        inner = self.vision_inner(size)
        yield "attn.qkv", (3 * width, width)
        yield "attn.proj", (width, width)
        yield "mlp.gate_proj", (inner, width)
        yield "mlp.up_proj", (inner, width)
        yield "mlp.down_proj", (width, inner)

    def vision_inner(self, size: Sizes) -> int:
        """Width of a block's feed-forward part."""
        return size("out_hidden_size")

    def merger_width(self, size: Sizes) -> int:
        """Width inside the merger."""
        return size("intermediate_size")
