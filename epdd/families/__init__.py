"""Facts of a model, without torch: placeholder tokens, grid and image tokens of an image, processor settings.

`load(folder)` reads the JSON files of a checkpoint and returns a `ModelInfo`; `of(config)` takes the config.json.
The daemon computes image tokens from the size of an image, and the encoder resizes to the same grid.
What differs between families is in one file each, listed in `registry.py`.
"""

from epdd.families.model_info import DEMO, ITEMSIZE, Defaults, ModelInfo
from epdd.families.registry import at, family, load, of

__all__ = ["DEMO", "ITEMSIZE", "Defaults", "ModelInfo", "at", "family", "load", "of"]
