"""PaddleOCR-VL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from epdd.errors import MediaError
from epdd.families.config_fields import ROPE
from epdd.families.files import Fields
from epdd.families.image_tokens import Grid
from epdd.families.layers import full_attention
from epdd.families.model_info import ASPECT_MAX, ModelInfo, text_fields
from epdd.families.processor import ProcessorRule
from epdd.families.qwen_vl.base import QwenVL
from epdd.families.tensors import HARMLESS, Named, Sizes, linear, norm

TOWER, PROJECTOR = "model.visual.vision_model.", "model.projector."


class PaddleInfo(ModelInfo):
    """Facts of a PaddleOCR-VL checkpoint."""

    def grid(self, width: int, height: int, min_pixels: int = 0, max_pixels: int = 0) -> Grid:
        """As of ModelInfo, after a side below one image token is scaled up to it."""
        factor = self.patch * self.merge
        if height < factor:
            width, height = round(width * factor / height), factor
        if width < factor:
            width, height = factor, round(height * factor / width)
        if max(width, height) > ASPECT_MAX * min(width, height):
            raise MediaError(f"one side of the image is over {ASPECT_MAX} times the other ({width} x {height})")
        return super().grid(width, height, min_pixels, max_pixels)


class PaddleOcrVL(QwenVL):
    """A SigLIP tower with rotary positions and a projector of its own; ERNIE 4.5 as the language model.

    Many files have the language model's fields at the top level.
    """

    model_type = "paddleocr_vl"
    fast_tower = False
    vision_input = "rows"
    of_vision = r"\b(visual|mlp_AR|projector)\."
    vision_modules = ("visual", "projector")
    ignored = re.compile(HARMLESS.pattern + r"|packing_position_embedding|vision_model\.head")
    info_type = PaddleInfo
    rule = ProcessorRule(
        ("PaddleOCRVLImageProcessor", "PaddleOCRVLImageProcessorFast", "PaddleOCRVLImageProcessorPil"),
        min_pixels=384 * 384, max_pixels=1536 * 1536, temporal=1)
    text_defaults = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
                     "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 103424, "head_dim": 128}
    vision_defaults = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                       "num_attention_heads": 16, "num_channels": 3, "image_size": 384, "patch_size": 14,
                       "spatial_merge_size": 2}
    sections = [16, 24, 24]
    rope_types = (*ROPE, "mrope")
    heads_key = "num_attention_heads"

    def info(self, config: Fields) -> ModelInfo:
        text = text_fields(config)
        size = Sizes(text, self.text_defaults)
        heads = text.whole("num_key_value_heads", size.absent("num_key_value_heads", size("num_attention_heads")))
        return replace(super().info(config), layers=full_attention(
            size("num_hidden_layers"), 2 * heads * self.head_size(text)))

    def image_width(self, text: Fields, vision: Fields) -> int:
        return Sizes(text, self.text_defaults)("hidden_size")

    def canonical(self, name: str) -> str:
        name = re.sub(r"^mlp_AR", "model.projector", name)
        name = re.sub(r"^visual", "model.visual", name)
        return re.sub(r"^model(?!(\.visual|\.projector|\.language_model))", "model.language_model", name)

    def head_size(self, text: Fields) -> int:
        size = Sizes(text, self.text_defaults)
        if text.has("head_dim") and text.get("head_dim") is None:
            return super().head_size(text)
        return size("head_dim")

    def tied(self, config: Fields, text: Fields) -> bool:
        # For a config without text_config, transformers takes the language model's default.
        return (config.flag("tie_word_embeddings", True) or config.get("text_config") is None
                or text.flag("tie_word_embeddings", True))

    def check(self, config: Fields) -> None:
        super().check(config)
        config.part("vision_config").whole("image_size", 384, least=1)
        if (text := text_fields(config)).flag("use_bias", False):
            raise text.wrong("use_bias", "false")

    def biased(self, text: Fields) -> str:
        return ""

    def vision(self, vision: Fields) -> Iterator[Named]:
        size = Sizes(vision, self.vision_defaults)
        width, inner, side = size("hidden_size"), size("intermediate_size"), size("patch_size")
        yield from ((TOWER + "embeddings.patch_embedding.weight", (width, size("num_channels"), side, side)),
                    (TOWER + "embeddings.patch_embedding.bias", (width,)),
                    (TOWER + "embeddings.position_embedding.weight", ((size("image_size") // side) ** 2, width)))
        for layer in range(size("num_hidden_layers")):
            at = f"{TOWER}encoder.layers.{layer}."
            yield from norm(at + "layer_norm1", width)
            yield from norm(at + "layer_norm2", width)
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from linear(f"{at}self_attn.{name}", width, width)
            yield from linear(at + "mlp.fc1", inner, width)
            yield from linear(at + "mlp.fc2", width, inner)
        yield from norm(TOWER + "post_layernorm", width)

    def projector(self, text: Fields, vision: Fields) -> Iterator[Named]:
        size = Sizes(vision, self.vision_defaults)
        width = size("hidden_size")
        wide = width * size("spatial_merge_size") ** 2
        yield from norm(PROJECTOR + "pre_norm", width)
        yield from linear(PROJECTOR + "linear_1", wide, wide)
        yield from linear(PROJECTOR + "linear_2", self.image_width(text, vision), wide)
