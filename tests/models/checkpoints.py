"""Random checkpoints of the three families, written offline, and transformers' answers with them.

The weights are wide enough (std) that greedy answers vary with the prompt and with the pixels; sizes are
the smallest that still exercise grouped heads, deepstack and window attention.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from PIL import Image  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

from epdd import families  # noqa: E402

transformers.logging.set_verbosity_error()

TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")        # with a vision tower of their own
FAMILIES = (*TOWERS, "qwen3_vl_moe")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
            "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{%- for m in messages -%}<|im_start|>{{ m.role + '\n' }}"
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for c in m.content -%}"
    "{%- if c.type in ('image', 'image_url') or 'image' in c -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif 'text' in c -%}{{ c.text }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "<|im_end|>{{ '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}"
)
WORDS = ("the a of to in is on with image shows what describe this picture red blue green left right top bottom "
         "how many there are word user assistant system answer yes no circle square triangle count").split()


@dataclass(frozen=True)
class Size:
    """Widths of a checkpoint; TINY has about 0.2 million parameters, BIG some hundred megabytes in float32."""

    hidden: int = 64
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    inter: int = 96
    vocab: int = 640
    vision_hidden: int = 32
    vision_layers: int = 4
    vision_heads: int = 2
    vision_inter: int = 64
    max_model_len: int = 4096
    max_pixels: int = 28 * 28 * 64


TINY = Size()
BIG = Size(hidden=512, layers=8, heads=8, kv_heads=4, inter=2048, vocab=32000, vision_hidden=512,
           vision_layers=16, vision_heads=8, vision_inter=2048, max_pixels=28 * 28 * 256)


def build(folder: Path, family: str = "qwen3_vl", size: Size = TINY, dtype: str = "float32", tie: bool = False,
          shards: int = 1, std: float = 0.2, seed: int = 0) -> Path:
    """Write a complete checkpoint (weights, tokenizer, template, processor settings) and return its folder."""
    ids = write_tokenizer(folder, size.vocab)
    config = _config(family, size, ids, tie)
    write(folder, config, ids, dtype, shards, std, seed)
    _write_processor(folder, family, config, size)
    return folder


def write(folder: Path, config: Any, ids: dict[str, int], dtype: str = "float32", shards: int = 1, std: float = 0.2,
          seed: int = 0) -> None:
    """Random weights of a transformers config, and its settings; `ids` are those of `write_tokenizer`."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # The usual 1/sqrt(fan-in) keeps activations near one at any width; std scales from there.
                parameter.normal_(0.0, std * 8 / parameter[0].numel() ** 0.5)
            elif name.endswith("weight"):
                parameter.uniform_(0.6, 1.4)
            else:
                parameter.normal_(0.0, 0.1)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=weights // shards + 4096 if shards > 1 else "50GB")
    write_json(folder / "generation_config.json", {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
                                                   "pad_token_id": ids["<|endoftext|>"], "do_sample": False})


def _config(family: str, size: Size, ids: dict[str, int], tie: bool) -> Any:
    head = size.hidden // size.heads
    side = head // 2 * (20 if family.startswith("qwen3_vl") else 24) // 64
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6,
                            "mrope_section": [head // 2 - 2 * side, side, side]}
    text: dict[str, Any] = {
        "vocab_size": size.vocab, "hidden_size": size.hidden, "intermediate_size": size.inter,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": size.max_model_len, "rms_norm_eps": 1e-6, "tie_word_embeddings": tie,
        "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"],
    }
    vision: dict[str, Any] = {"depth": size.vision_layers, "num_heads": size.vision_heads, "spatial_merge_size": 2,
                              "temporal_patch_size": 2, "patch_size": 16 if family.startswith("qwen3_vl") else 14}
    if family.startswith("qwen3_vl"):
        text["head_dim"] = head
        rope["mrope_interleaved"] = True
        vision |= {"hidden_size": size.vision_hidden, "intermediate_size": size.vision_inter, "in_channels": 3,
                   "out_hidden_size": size.hidden, "num_position_embeddings": 256,
                   "deepstack_visual_indexes": [0, 1, 2]}
    elif family == "qwen2_5_vl":
        vision |= {"hidden_size": size.vision_hidden, "intermediate_size": size.vision_inter, "in_channels": 3,
                   "out_hidden_size": size.hidden, "window_size": 112, "tokens_per_second": 4,
                   "fullatt_block_indexes": [size.vision_layers - 1]}
    else:
        vision |= {"embed_dim": size.vision_hidden, "hidden_size": size.hidden, "in_channels": 3,
                   "mlp_ratio": size.vision_inter // size.vision_hidden}
    if family == "qwen3_vl_moe":    # the first layer has no experts
        text |= {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    text["rope_parameters"] = rope
    return type(transformers.AutoConfig.for_model(family))(
        text_config=text, vision_config=vision, tie_word_embeddings=tie,
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"])


def write_tokenizer(folder: Path, vocab: int = TINY.vocab) -> dict[str, int]:
    """Tokenizer and chat template; the ids of SPECIALS."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=min(vocab - len(SPECIALS), 400), show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator([" ".join(WORDS), " ".join(reversed(WORDS))] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": 4096, "chat_template": CHAT_TEMPLATE})
    return {text: tokenizer.token_to_id(text) for text in SPECIALS}


def _write_processor(folder: Path, family: str, config: Any, size: Size) -> None:
    clip = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    mean, std = ((0.5,) * 3, (0.5,) * 3) if family.startswith("qwen3_vl") else clip
    write_json(folder / "preprocessor_config.json", {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": config.vision_config.patch_size,
        "temporal_patch_size": 2, "merge_size": 2, "image_mean": mean, "image_std": std,
        "size": {"shortest_edge": 56 * 56, "longest_edge": size.max_pixels}})


def write_json(path: Path, data: dict[str, Any]) -> None:
    """A settings file."""
    path.write_text(json.dumps(data, indent=1))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB picture with edges and gradients; the same seed gives the same pixels."""
    rng = np.random.default_rng(seed)
    x, y = np.linspace(0, 1, width)[None, :], np.linspace(0, 1, height)[:, None]
    planes = [np.sin(rng.uniform(2, 20) * x + rng.uniform(2, 20) * y + rng.uniform(0, 6)) * 127 + 128 for _ in range(3)]
    pixels = np.stack(planes, -1)
    left, top = rng.integers(0, max(1, width // 2)), rng.integers(0, max(1, height // 2))
    pixels[top:top + height // 3 + 1, left:left + width // 3 + 1] = rng.integers(0, 256, 3)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@lru_cache(maxsize=None)
def whole_model(folder: str) -> Any:
    """The undivided transformers model in float32."""
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@lru_cache(maxsize=None)
def image_processor(folder: str) -> Any:
    """The reference image processor on Pillow; by its class where AutoImageProcessor of older versions asks for
    torchvision."""
    if families.at(folder).model_type in FAMILIES:
        return Qwen2VLImageProcessorPil.from_pretrained(folder)
    return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")


def image_inputs(folder: str, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """What the reference image processor makes of images: arguments of the model."""
    return dict(image_processor(folder)(images=list(images), return_tensors="pt"))


def pixel_values(folder: str, images: Sequence[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference patches [n, channels * temporal * patch * patch] and grids [images, 3]."""
    out = image_processor(folder)(images=list(images), return_tensors="pt")
    return out["pixel_values"], out["image_grid_thw"]


@torch.inference_mode()
def reference_generate(folder: str, tokens: Sequence[int], images: Sequence[Image.Image], max_new: int) -> list[int]:
    """Greedy answer of the undivided model to a prompt whose placeholders are expanded; an EOS is kept."""
    model = whole_model(folder)
    ids = torch.tensor([list(tokens)])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if images:
        inputs |= image_inputs(folder, images)
        if "mm_token_type_ids" in inspect.signature(model.model.forward).parameters:
            inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    out = model.generate(**inputs, max_new_tokens=max_new, do_sample=False)
    return out[0, len(tokens):].tolist()
