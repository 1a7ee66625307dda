"""Facts of a checkpoint, and what its settings say in the same way in every family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epdd.errors import MediaError, ModelError
from epdd.families.files import Fields
from epdd.families.image_tokens import Expansion, Grid
from epdd.families.layers import Keeps, LayerKind, Positions, full_attention

ASPECT_MAX = 200            # the families' resize rule refuses more (D09: exactly 200 is allowed)
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
AUTO = "auto"               # as a dtype in config.json: the type of the weights, as if it were missing

DEMO = Path(__file__).parents[1] / "demo"       # ships with epdd; the default model


@dataclass(frozen=True)
class Defaults:
    """Sampling defaults of the checkpoint (generation_config.json), for fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ModelInfo:
    """Facts of one checkpoint.  Sizes of images are (width, height) in pixels after rotation by EXIF.

    An image is cut into patches on a grid whose sides are multiples of `merge`, and the language model gets one image
    token for each merge x merge patches.  A family with other rules has a subclass.
    """

    model_type: str
    folder: str
    image_token_id: int         # the embedding's rows take the places of this id
    template_ids: tuple[int, ...]   # of an image in the chat template: one is `placeholder`, which `expand` replaces
    patch: int                  # side in pixels
    merge: int                  # merge x merge patches become one image token
    temporal: int               # frames of a patch; an image is repeated
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]     # of pixel values from 0 to 1, by channel; includes the rescaling of the processor
    std: tuple[float, ...]
    hidden: int                 # width of an image token
    planes: int                 # levels of an image token: 1 + deepstack levels
    max_model_len: int          # tokens
    vocab: int                  # rows of the embedding table: ids that a client may name are below
    eos_ids: tuple[int, ...]
    defaults: Defaults = Defaults()
    weights: str = ""           # digest by checkpoint.identity; empty: not known
    stored: str = "bfloat16"    # dtype of the weights in config.json; empty: not named
    parameters: tuple[int, int] = (0, 0)    # of vision tower and language model; zeros: not known
    vision_width: int = 0
    layers: tuple[LayerKind, ...] = ()      # of the language model, in order; empty: not known
    positions: Positions = Positions.PLAIN
    bidirectional_images: bool = False      # an image's tokens attend to each other in both directions
    placeholder_id: int | None = None       # None: image_token_id
    inner_ids: tuple[int, ...] = ()         # that `expand` writes beside image tokens and those of the template
    # Text that the processor writes before and after an image.  It is tokenised together with the text next to it.
    text_around: tuple[str, str] = ("", "")

    @property
    def placeholder(self) -> int:
        """The token of the chat template that stands for an image."""
        return self.image_token_id if self.placeholder_id is None else self.placeholder_id

    @property
    def control_ids(self) -> tuple[int, ...]:
        """All tokens around and between image tokens: a client's text must not become them."""
        return tuple(dict.fromkeys((*self.template_ids, self.image_token_id, self.placeholder, *self.inner_ids)))

    @property
    def kv_numbers(self) -> int:
        """Numbers in keys and values of one token, over all layers that keep all tokens; 0: not known."""
        return sum(layer.own_numbers for layer in self.layers if layer.keeps is Keeps.FULL)

    def grid(self, width: int, height: int, min_pixels: int = 0, max_pixels: int = 0) -> Grid:
        """(1, rows, columns) in patches to which an image of this size is resized.

        The rule is `smart_resize` of the families: sides are rounded to multiples of patch * merge, and the area is
        scaled into [min_pixels, max_pixels] (0: the checkpoint's own) at the same aspect ratio.
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

    def patches(self, grid: Grid) -> int:
        """The encoder's work on an image with this grid."""
        return math.prod(grid)

    def rows(self, grid: Grid) -> int:
        """Image tokens of an image with this grid."""
        return math.prod(grid) // self.merge ** 2

    def expand(self, grid: Grid) -> Expansion:
        """The ids that replace an image's placeholder."""
        return Expansion([self.image_token_id] * self.rows(grid))

    def embedding_bytes(self, rows: int, dtype: str = "float32") -> int:
        """Bytes of the embedding of `rows` image tokens, deepstack levels included."""
        return rows * self.hidden * self.planes * ITEMSIZE[dtype]

    @property
    def rows_max(self) -> int:
        """Image tokens of the largest image that the checkpoint's settings allow."""
        return max(1, self.max_pixels // (self.patch * self.merge) ** 2)


def text_fields(config: Fields) -> Fields:
    """Settings of the language model; before transformers 4.52 they were at the top level."""
    return config if config.get("text_config") is None else config.part("text_config")


def facts(config: Fields, text: Fields) -> dict[str, Any]:
    """Fields of ModelInfo that every family reads alike; `text` as from `text_fields`.  Raises ModelError."""
    root = config.path.parent
    generation = Fields(root / "generation_config.json", {})
    for key in ("pad_token_id", "bos_token_id"):
        generation.tokens(key)      # unused here, but transformers checks them when it loads the model
    return {
        "model_type": config.get("model_type"), "folder": str(root),
        "max_model_len": text.whole("max_position_embeddings", least=1),
        "vocab": text.whole("vocab_size", least=1),
        "eos_ids": tuple(dict.fromkeys([*generation.tokens("eos_token_id"), *config.tokens("eos_token_id"),
                                        *text.tokens("eos_token_id")])),
        "defaults": _defaults(generation), "stored": _stored(config, text), "layers": _layers(text)}


def _layers(text: Fields) -> tuple[LayerKind, ...]:
    """Full attention in all layers; other families replace it."""
    heads = text.whole("num_attention_heads", 1, least=1)
    size = text.whole("head_dim", 0) or text.whole("hidden_size", 0) // heads
    return full_attention(text.whole("num_hidden_layers", 0), 2 * text.whole("num_key_value_heads", heads) * size)


def _stored(config: Fields, text: Fields) -> str:
    said = [part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype")]
    name = str(next((each for each in said if each and each != AUTO), ""))
    if name and name not in ITEMSIZE:
        raise ModelError(f"{config.path}: dtype {name!r} is not served; epdd serves {', '.join(ITEMSIZE)}")
    return name


def _defaults(generation: Fields) -> Defaults:
    """Greedy if the file has do_sample false or temperature 0; fields it leaves out have the defaults of the API."""
    penalty = generation.number("repetition_penalty", 1.0)
    if penalty <= 0:
        raise ModelError(f"{generation.path}: repetition_penalty is {penalty:g}; it must be over 0")
    temperature = generation.number("temperature", 1.0)
    if generation.get("do_sample") is False or temperature == 0:
        return Defaults(temperature=0.0, repetition_penalty=penalty)
    return Defaults(temperature=temperature, top_p=generation.number("top_p", 1.0),
                    top_k=max(0, generation.whole("top_k", 0, least=-1)), repetition_penalty=penalty)
