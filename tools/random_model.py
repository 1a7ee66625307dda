"""Writes a Qwen3-VL checkpoint of a chosen size with random weights, for benchmarks.

    python -m tools.random_model /tmp/random --shape 100m

Complete for any server: weights, configuration, generation settings, image processor, the demo's tokenizer and chat
template.  An answer never ends by itself, and every token of it is printable text: the output rows of all other tokens
are zero, so they are never the most likely.  A stream therefore has as many chunks as tokens, also on servers without
`ignore_eos`.  Greedy answers of all correct servers are equal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

DEMO = Path(__file__).resolve().parents[1] / "epdd" / "demo"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PATCH, MERGE = 16, 2


@dataclass(frozen=True)
class Shape:
    """Widths of a checkpoint.  As in Qwen3-VL, heads are grouped, a picture's patches have 16 pixels a side, four of
    them make one row of an embedding, and three layers of the tower send features to the first language layers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inter: int
    vocab: int
    vision_hidden: int
    vision_layers: int
    vision_heads: int
    vision_inter: int
    head_dim: int = 64
    max_model_len: int = 16384
    side_max: int = 2048                # pixels a side of a square picture: larger ones are resized


# By the parameters of the language layers with their output, which a decode step reads.
SHAPES = {
    "tiny": Shape(hidden=128, layers=4, heads=4, kv_heads=2, inter=384, vocab=1024, head_dim=32,
                  vision_hidden=96, vision_layers=4, vision_heads=3, vision_inter=384),
    "100m": Shape(hidden=768, layers=12, heads=12, kv_heads=4, inter=2048, vocab=32000,
                  vision_hidden=512, vision_layers=12, vision_heads=8, vision_inter=2048),
    "500m": Shape(hidden=1536, layers=18, heads=12, kv_heads=4, inter=4096, vocab=32000, head_dim=128,
                  vision_hidden=768, vision_layers=12, vision_heads=12, vision_inter=3072),
}


def build(folder: Path, shape: Shape, dtype: str = "float32", seed: int = 0, device: str = "cpu") -> Path:
    """Write the checkpoint into the folder and return it.  `dtype`: "float32" or "bfloat16"; the weights are drawn on
    `device`, and differ between devices."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    tokens = json.loads((DEMO / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokens["added_tokens"]}
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(_config(shape, ids)).to(getattr(torch, dtype))
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # The usual 1/sqrt(fan-in) keeps activations near one at any width.
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        said = torch.zeros(shape.vocab, dtype=torch.bool, device=device)
        said[printable(tokens["model"]["vocab"])] = True
        model.lm_head.weight[~said] = 0.0
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)     # safetensors writes it readable by its owner alone
    for name in TOKENIZER:
        shutil.copyfile(DEMO / name, folder / name)
    _write(folder / "tokenizer_config.json",
           json.loads((DEMO / "tokenizer_config.json").read_text()) | {"model_max_length": shape.max_model_len})
    _write(folder / "generation_config.json", {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
                                               "pad_token_id": ids["<|endoftext|>"], "do_sample": False})
    processor = json.loads((DEMO / "preprocessor_config.json").read_text())
    _write(folder / "preprocessor_config.json", processor | {
        "patch_size": PATCH, "merge_size": MERGE,
        "size": {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": shape.side_max ** 2}})
    return folder


def printable(vocabulary: dict[str, int]) -> Sequence[int]:
    """Tokens of letters and digits alone: whole characters, which a stream never holds back."""
    return [number for text, number in vocabulary.items() if text.isascii() and text.isalnum()]


def _config(shape: Shape, ids: dict[str, int]):
    from transformers import Qwen3VLConfig

    side = shape.head_dim // 2 * 20 // 64           # Qwen3-VL's 24, 20, 20 of 64, at any width
    depth = shape.vision_layers
    return Qwen3VLConfig(
        text_config={
            "vocab_size": shape.vocab, "hidden_size": shape.hidden, "intermediate_size": shape.inter,
            "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
            "max_position_embeddings": shape.max_model_len, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_interleaved": True,
                                "mrope_section": [shape.head_dim // 2 - 2 * side, side, side]},
            "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]},
        vision_config={
            "depth": depth, "hidden_size": shape.vision_hidden, "intermediate_size": shape.vision_inter,
            "num_heads": shape.vision_heads, "patch_size": PATCH, "spatial_merge_size": MERGE,
            "temporal_patch_size": 2, "out_hidden_size": shape.hidden, "num_position_embeddings": 48 ** 2,
            "deepstack_visual_indexes": [math.ceil(depth * share) - 1 for share in (0.25, 0.5, 0.75)]},
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False)


def _write(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="100m", choices=SHAPES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seed", type=int, default=0)
    for name in Shape.__dataclass_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="another than the shape's")
    args = parser.parse_args()
    asked = {name: value for name in Shape.__dataclass_fields__ if (value := getattr(args, name)) is not None}
    build(args.folder, replace(SHAPES[args.shape], **asked), args.dtype, args.seed)
    size = (args.folder / "model.safetensors").stat().st_size
    print(f"{args.folder}: {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
