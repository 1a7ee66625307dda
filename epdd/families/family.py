"""The Qwen-VL families (Qwen2-VL, Qwen2.5-VL, Qwen3-VL) as read from a checkpoint folder.

All three cut an image into patches on a grid whose sides are multiples of `merge`, and send the language
model one row per merge x merge patches.  They differ in processor defaults and in deepstack planes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epdd.errors import MediaError, ModelError
from epdd.families.files import read_json

ASPECT_MAX = 200            # the families' own resize rule refuses more (D09: exactly 200 is legal)
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

DEMO = Path(__file__).parents[1] / "demo"       # ships with epdd; served when no other model is named

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

# model_type -> hidden-size field of vision_config that the language model sees
_OUT_HIDDEN = {"qwen2_vl": "hidden_size", "qwen2_5_vl": "out_hidden_size", "qwen3_vl": "out_hidden_size"}


@dataclass(frozen=True)
class Defaults:
    """How the checkpoint's makers mean it to be sampled: used for what a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Family:
    """One checkpoint's facts.  Sizes of images are (width, height) in upright pixels."""

    model_type: str
    folder: str
    image_token_id: int
    vision_start_id: int
    vision_end_id: int
    patch: int                  # pixels a side
    merge: int                  # patches a side that become one row
    temporal: int               # frames a patch spans; a still is repeated
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    hidden: int                 # width of a row
    planes: int                 # 1 + deepstack features
    context_max: int            # tokens
    vocab: int                  # rows of the embedding table: the ids a client may name
    eos_ids: tuple[int, ...]
    defaults: Defaults = Defaults()
    weights: str = ""           # which files they are, by families.weights; empty: not known
    stored: str = "bfloat16"    # dtype of the weights as they lie in the files
    parameters: tuple[int, int] = (0, 0)    # of vision tower and language model, by checkpoint.look; zeros: not known
    vision_width: int = 0
    kv_numbers: int = 0         # keys and values of one token, over all layers

    def grid(self, width: int, height: int, min_pixels: int = 0, max_pixels: int = 0) -> tuple[int, int, int]:
        """(1, rows, columns) in patches that an image of this size is resized to.

        The rule is the families' `smart_resize`: sides rounded to multiples of patch * merge, the area
        brought into [min_pixels, max_pixels] (0: the checkpoint's own) at the same aspect ratio.
        Raises MediaError if one side is over 200 times the other.
        """
        low, high = min_pixels or self.min_pixels, max_pixels or self.max_pixels
        if max(width, height) > ASPECT_MAX * min(width, height):
            raise MediaError(f"one side of the image is over {ASPECT_MAX} times the other ({width} x {height})")
        factor = self.patch * self.merge
        rows, columns = (round(side / factor) * factor for side in (height, width))
        if rows * columns > high:
            scale = math.sqrt((height * width) / high)
            rows, columns = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
        elif rows * columns < low:
            scale = math.sqrt(low / (height * width))
            rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return 1, rows // self.patch, columns // self.patch

    def rows(self, grid: tuple[int, int, int]) -> int:
        """Placeholder tokens of an image: what the language model reads."""
        return math.prod(grid) // self.merge ** 2

    def embedding_bytes(self, rows: int, dtype: str = "float32") -> int:
        """Bytes of an image's embedding, deepstack planes included."""
        return rows * self.hidden * self.planes * ITEMSIZE[dtype]

    @property
    def rows_max(self) -> int:
        """Rows of the largest image the checkpoint's own settings allow."""
        return max(1, self.max_pixels // (self.patch * self.merge) ** 2)


def load(folder: str) -> Family:
    """Read a checkpoint's JSON files.  Raises ModelError naming what is missing or not supported."""
    root = Path(folder)
    config = read_json(root / "config.json")
    kind = config.get("model_type")
    if kind not in _OUT_HIDDEN:
        raise ModelError(f"{folder}: model_type {kind!r} is not served; epdd serves {', '.join(_OUT_HIDDEN)}")
    try:
        return _family(root, config)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder}: a checkpoint file lacks or misstates {error}") from None


def _family(root: Path, config: dict[str, Any]) -> Family:
    kind = config["model_type"]
    # Checkpoints saved before transformers 4.52 keep the language model's fields at the top level.
    text, vision = config.get("text_config") or config, config["vision_config"]
    generation = read_json(root / "generation_config.json", {})
    processor = read_json(root / "preprocessor_config.json")
    low, high = _pixel_limits(processor)
    patch, merge = _side(processor, "patch_size", vision), int(processor.get("merge_size", 2))
    return Family(
        model_type=kind, folder=str(root),
        image_token_id=int(config["image_token_id"]),
        vision_start_id=int(config["vision_start_token_id"]),
        vision_end_id=int(config["vision_end_token_id"]),
        patch=patch, merge=merge, temporal=_side(processor, "temporal_patch_size", vision),
        min_pixels=low, max_pixels=high,
        mean=tuple(processor.get("image_mean", CLIP_MEAN)), std=tuple(processor.get("image_std", CLIP_STD)),
        hidden=int(vision[_OUT_HIDDEN[kind]]),
        planes=1 + len(vision.get("deepstack_visual_indexes") or ()),
        context_max=int(text["max_position_embeddings"]),
        vocab=int(text["vocab_size"]),
        eos_ids=_eos_ids(generation, text),
        defaults=_defaults(generation),
        stored=str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "float32"),
        vision_width=int(vision.get("embed_dim") or vision.get("hidden_size") or 0),
        kv_numbers=_kv_numbers(text),
    )


def _kv_numbers(text: dict[str, Any]) -> int:
    heads = int(text.get("num_attention_heads") or 1)
    size = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    return 2 * int(text.get("num_hidden_layers") or 0) * int(text.get("num_key_value_heads") or heads) * size


def _pixel_limits(processor: dict[str, Any]) -> tuple[int, int]:
    """The size rule in its three spellings; the defaults are those of transformers' processor class."""
    size = processor.get("size") or {}
    low = processor.get("min_pixels") or size.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    high = processor.get("max_pixels") or size.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    return int(low), int(high)


def _side(processor: dict[str, Any], key: str, vision: dict[str, Any]) -> int:
    value = processor[key] if key in processor else vision[key]
    return int(value[0] if isinstance(value, list) else value)


def _eos_ids(generation: dict[str, Any], text: dict[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id", text.get("eos_token_id"))
    return tuple(value) if isinstance(value, list) else () if value is None else (int(value),)


def _defaults(generation: dict[str, Any]) -> Defaults:
    """Greedy where the file says do_sample false; the API's own 1.0 where it says nothing."""
    if generation.get("do_sample") is False:
        return Defaults(temperature=0.0, repetition_penalty=float(generation.get("repetition_penalty") or 1.0))
    return Defaults(temperature=float(generation.get("temperature") or 1.0),
                    top_p=float(generation.get("top_p") or 1.0), top_k=int(generation.get("top_k") or 0),
                    repetition_penalty=float(generation.get("repetition_penalty") or 1.0))
