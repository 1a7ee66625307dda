"""Qwen3-VL with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from epdd.errors import ModelError
from epdd.families.files import Fields
from epdd.families.model_info import text_fields
from epdd.families.qwen_vl.qwen3_vl import Qwen3VL
from epdd.families.tensors import Expected, Named, Sizes


class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL whose layers, or some of them, have experts in the place of the feed-forward part."""

    model_type = "qwen3_vl_moe"
    text_defaults = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
                     "num_key_value_heads": 16, "vocab_size": 151936, "moe_intermediate_size": 1408, "num_experts": 60,
                     "num_experts_per_tok": 4, "decoder_sparse_step": 1}

    def check(self, config: Fields) -> None:
        super().check(config)
        text = text_fields(config)
        count, key = self._experts(text), "num_experts_per_tok"
        if (chosen := text.whole(key, self.text_defaults[key], least=1)) > count:
            raise ModelError(f"{text.path}: {key} is {chosen}; at most num_experts, {count}, is expected, as in the "
                             "original checkpoint")

    def head_size(self, text: Fields) -> int:
        size = Sizes(text, self.text_defaults)
        return text.whole("head_dim", 0) or size("hidden_size") // size("num_attention_heads")

    def feed_forward(self, at: str, layer: int, text: Fields, size: Sizes) -> Iterator[Named]:
        if layer in text.wholes("mlp_only_layers") or (layer + 1) % size("decoder_sparse_step"):
            yield from super().feed_forward(at, layer, text, size)
            return
        count, hidden, inner = self._experts(text), size("hidden_size"), size("moe_intermediate_size")
        yield at + "gate.weight", (count, hidden)
        yield at + "experts.gate_up_proj", (count, hidden, 2 * inner)
        yield at + "experts.down_proj", (count, inner, hidden)

    def expected(self, config: Fields) -> Expected:
        # As published; save_pretrained writes them turned.
        found = super().expected(config)
        return replace(found, either_way=frozenset(name for name in found.shapes if ".experts." in name))

    def _experts(self, text: Fields) -> int:
        key = "num_experts" if text.has("num_experts") else "num_local_experts"
        return text.whole(key, self.text_defaults["num_experts"], least=1)
