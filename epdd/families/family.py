"""What a family of models answers, so that no other part of epdd knows a family by name.  Without torch."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from epdd.families.files import Fields
from epdd.families.model_info import ModelInfo
from epdd.families.tensors import HARMLESS, Expected


class Family(ABC):
    """One model_type of config.json."""

    model_type: str
    # Which stored tensors belong to the encoder, in every layout of the family; all others are the language model's.
    of_vision: str
    vision_modules: tuple[str, ...] = ("visual",)       # the same as attributes of transformers' base model
    language_modules: tuple[str, ...] = ("language_model",)     # the other ones
    # Whether `worker/vision/tower.py` runs the tower; else transformers' `get_image_features` does, and `vision_input`
    # names the rule of `worker/vision/inputs.py` that makes its arguments.
    ignored: re.Pattern[str] = HARMLESS         # tensors that may be there and are not used
    fast_tower: bool = False
    vision_input: str = "patches"

    @abstractmethod
    def info(self, config: Fields) -> ModelInfo:
        """Facts of a checkpoint; how images become tokens is a method of what is returned.  Raises ModelError naming
        the file and the field that is wrong or not served."""

    @abstractmethod
    def check(self, config: Fields) -> None:
        """Check what transformers' classes would find only when a worker uses it.  Raises ModelError."""

    @abstractmethod
    def expected(self, config: Fields) -> Expected:
        """Tensors of a checkpoint with this config.json.  Raises ModelError for a field that is not a size."""

    def canonical(self, name: str) -> str:
        """The name under which transformers loads a tensor, from its name in any layout of the family."""
        return name

    def is_vision(self, name: str) -> bool:
        """Whether a tensor stored under this name belongs to the encoder."""
        return re.search(self.of_vision, name) is not None
