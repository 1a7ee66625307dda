"""What the Qwen-VL families share: image sizes, positions, and a language model of the Llama kind."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from epdd.errors import ModelError
from epdd.families import config_fields, model_info, processor
from epdd.families.family import Family
from epdd.families.files import Fields
from epdd.families.layers import Positions
from epdd.families.model_info import ModelInfo, text_fields
from epdd.families.tensors import EMBEDDING, HEAD, LANGUAGE, Expected, Named, Sizes

VISION = "model.visual."


class QwenVL(Family):
    """One of them; `text` and `vision` are these sections of config.json."""

    of_vision = r"\bvisual\."
    fast_tower = True
    # transformers' defaults for fields that config.json leaves out.
    text_defaults: Mapping[str, int]
    vision_defaults: Mapping[str, int]
    sections: list[int]             # of rotary positions: time, height and width
    rope_types: tuple[str, ...] = config_fields.ROPE
    rule = processor.QWEN           # of the image processor
    info_type = ModelInfo
    template_keys: tuple[str, ...] = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    width_key = "hidden_size"       # field of vision_config: width inside the tower
    heads_key = "num_heads"
    out_key = "out_hidden_size"     # width of an image token in the language model

    def info(self, config: Fields) -> ModelInfo:
        text, vision = text_fields(config), config.part("vision_config")
        seen = processor.load(config.path.parent, vision, self.rule)
        return self.info_type(
            **model_info.facts(config, text),
            image_token_id=config.whole("image_token_id"),
            template_ids=tuple(map(config.whole, self.template_keys)),
            patch=seen.patch, merge=seen.merge, temporal=seen.temporal,
            min_pixels=seen.min_pixels, max_pixels=seen.max_pixels, mean=seen.mean, std=seen.std,
            hidden=self.image_width(text, vision),
            planes=1 + len(vision.wholes("deepstack_visual_indexes")),
            vision_width=vision.whole("embed_dim", 0) or vision.whole("hidden_size", 0),
            positions=Positions.MROPE)

    def image_width(self, text: Fields, vision: Fields) -> int:
        """Of an image token in the language model.  Raises ModelError."""
        return vision.whole(self.out_key, least=1)

    # --- config.json

    def check(self, config: Fields) -> None:
        text, vision = text_fields(config), config.part("vision_config")
        config_fields.check(config, text, vision)
        rows, hidden = self.image_width(text, vision), text.whole("hidden_size", self.text_defaults["hidden_size"])
        if rows != hidden:
            raise ModelError(f"{config.path}: vision_config.{self.out_key} is {rows}, but the language model's "
                             f"hidden_size is {hidden}; take the file of the original checkpoint")
        self._heads(text, vision)
        config_fields.full_attention(text)
        self._rope(text)
        if vision.get("rope_parameters") is not None:
            rope = vision.part("rope_parameters")
            if rope.has("rope_type") and rope.get("rope_type") != "axial":
                raise rope.wrong("rope_type", '"axial"')
            config_fields.theta(rope)

    def head_size(self, text: Fields) -> int:
        """Of the language model.  Raises ModelError."""
        size = Sizes(text, self.text_defaults)
        heads = size("num_attention_heads")
        if size("hidden_size") % (2 * heads):
            raise text.wrong("num_attention_heads", "a number whose double divides hidden_size")
        return size("hidden_size") // heads

    def rotary_size(self, text: Fields) -> int:
        """How much of each head the positions turn."""
        return self.head_size(text)

    def _heads(self, text: Fields, vision: Fields) -> None:
        """Heads must divide the width.  In the vision tower the size of a head must be a multiple of 4 as well."""
        size = Sizes(vision, self.vision_defaults)
        if size(self.width_key) % (4 * size(self.heads_key)):
            raise vision.wrong(self.heads_key, f"a number whose fourfold divides {self.width_key}")
        self.head_size(text)
        size = Sizes(text, self.text_defaults)
        heads = size("num_attention_heads")
        absent = heads if text.has("num_key_value_heads") else self.text_defaults["num_key_value_heads"]
        if heads % text.whole("num_key_value_heads", absent, least=1):
            raise text.wrong("num_key_value_heads", f"a number that divides num_attention_heads, {heads},")

    def _rope(self, text: Fields) -> None:
        key = next((key for key in ("rope_scaling", "rope_parameters") if text.get(key)), None)
        rope = None if key is None else text.part(key)
        section: Any = self.sections
        if rope is not None:
            for name in ("rope_type", "type"):
                if rope.has(name) and rope.get(name) not in self.rope_types:
                    raise rope.wrong(name, "one of " + ", ".join(self.rope_types))
            config_fields.theta(rope)
            section = rope.get("mrope_section", section)
        config_fields.theta(text)
        turned = self.rotary_size(text)
        sizes = isinstance(section, list) and len(section) == 3 and all(
            type(item) is int and item > 0 for item in section)
        if not sizes or 2 * sum(section) != turned:
            have = "is missing" if rope is None or not rope.has("mrope_section") else f"is {json.dumps(section)[:80]}"
            raise ModelError(f"{text.path}: mrope_section {have}; three numbers are expected whose sum is half of a "
                             f"head's size, {turned}")

    # --- tensors

    def expected(self, config: Fields) -> Expected:
        text, vision = text_fields(config), config.part("vision_config")
        return Expected(dict([*self._language(text), *self.vision(vision), *self.projector(text, vision)]),
                        self.tied(config, text))

    def tied(self, config: Fields, text: Fields) -> bool:
        """Whether the output layer and the embedding are one matrix."""
        return config.flag("tie_word_embeddings", False)

    def _language(self, text: Fields) -> Iterator[Named]:
        size = Sizes(text, self.text_defaults)
        hidden = size("hidden_size")
        yield EMBEDDING, (size("vocab_size"), hidden)
        yield HEAD, (size("vocab_size"), hidden)
        yield LANGUAGE + "norm.weight", (hidden,)
        for layer in range(size("num_hidden_layers")):
            at = f"{LANGUAGE}layers.{layer}."
            yield from self._attention(at + "self_attn.", text, size)
            yield from self.feed_forward(at + "mlp.", layer, text, size)
            for name in self.layer_norms:
                yield f"{at}{name}.weight", (hidden,)

    def _attention(self, at: str, text: Fields, size: Sizes) -> Iterator[Named]:
        hidden, heads, head = size("hidden_size"), size("num_attention_heads"), self.head_size(text)
        queries = heads * head
        keys = text.whole("num_key_value_heads", size.absent("num_key_value_heads", heads), least=1) * head
        biased = self.biased(text)
        for name, shape in (("q", (queries, hidden)), ("k", (keys, hidden)), ("v", (keys, hidden)),
                            ("o", (hidden, queries))):
            yield f"{at}{name}_proj.weight", shape
            if name in biased:
                yield f"{at}{name}_proj.bias", shape[:1]
        for name in self.head_norms:
            yield f"{at}{name}.weight", (head,)

    head_norms: tuple[str, ...] = ()        # of queries and keys

    def biased(self, text: Fields) -> str:
        """Which of the projections q, k, v, o have a bias."""
        return "qkv"

    def feed_forward(self, at: str, layer: int, text: Fields, size: Sizes) -> Iterator[Named]:
        """Of one layer, with names that begin with `at`."""
        hidden, inner = size("hidden_size"), size("intermediate_size")
        yield at + "gate_proj.weight", (inner, hidden)
        yield at + "up_proj.weight", (inner, hidden)
        yield at + "down_proj.weight", (hidden, inner)

    @abstractmethod
    def vision(self, vision: Fields) -> Iterator[Named]:
        """Of the vision tower."""

    def projector(self, text: Fields, vision: Fields) -> Iterator[Named]:
        """Of what lies between tower and language model, if it is no part of the tower."""
        yield from ()

    def patch_shape(self, size: Sizes) -> tuple[int, ...]:
        """Of the convolution that makes patches."""
        return size(self.width_key), size("in_channels"), size.side("temporal_patch_size"), *[
            size.side("patch_size")] * 2
