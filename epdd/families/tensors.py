"""Names and shapes of the tensors that a checkpoint must have, as a family computes them from config.json.

Names are those that transformers 5 loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from epdd.families.files import Fields

LANGUAGE = "model.language_model."
HEAD, EMBEDDING = "lm_head.weight", LANGUAGE + "embed_tokens.weight"

TensorShape = tuple[int, ...]
Named = tuple[str, TensorShape]

# Tensors that some checkpoints have and epdd ignores: rotary tables, which are computed from the settings, and layers
# for multi-token prediction.
HARMLESS = re.compile(r"(^|\.)(rotary_emb|rotary_pos_emb)\.inv_freq$|^(model\.)?mtp\.")


@dataclass(frozen=True)
class Expected:
    """`tied`: HEAD and EMBEDDING are the same matrix, so one of them may be missing.

    `either_way`: names of matrices that may be stored turned, their last two sizes swapped; transformers sees by the
    shape whether they are.
    """

    shapes: dict[str, TensorShape]
    tied: bool
    either_way: frozenset[str] = frozenset()

    def fits(self, name: str, shape: TensorShape) -> bool:
        """Whether the tensor may have this shape."""
        wanted = self.shapes[name]
        return shape == wanted or name in self.either_way and shape == (*wanted[:-2], wanted[-1], wanted[-2])


def linear(name: str, outs: int, ins: int) -> Iterator[Named]:
    """A linear layer with a bias."""
    yield name + ".weight", (outs, ins)
    yield name + ".bias", (outs,)


def norm(name: str, width: int) -> Iterator[Named]:
    """A layer norm with a bias."""
    yield name + ".weight", (width,)
    yield name + ".bias", (width,)


class Sizes:
    """Sizes from one section of config.json, with transformers' defaults for missing fields."""

    def __init__(self, fields: Fields, defaults: Mapping[str, int]) -> None:
        self._fields, self._defaults = fields, defaults

    def __call__(self, key: str) -> int:
        """Raises ModelError for a field that is not a size."""
        return self._fields.whole(key, self._defaults[key], least=1)

    def absent(self, key: str, null: int) -> int:
        """Value of a missing field if null has another meaning, `null`."""
        return null if self._fields.has(key) else self._defaults[key]

    def side(self, key: str) -> int:
        """A size that may be written as a list of equal sizes."""
        value: Any = self._fields.get(key)
        if isinstance(value, list) and len(set(map(str, value))) == 1 and isinstance(value[0], int):
            return value[0]
        return self(key)
