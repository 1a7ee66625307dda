"""What a model family is, without torch: placeholder tokens, grid and rows of an image, processor settings.

`load(folder)` reads a checkpoint's JSON files and returns a `ModelInfo`; `of(config)` does so once config.json is read.
Both sides use it: the daemon to count tokens from an image's size alone, the encoder to resize to the same grid.
"""

from epdd.families.model_info import DEMO, ITEMSIZE, Defaults, ModelInfo, load, of

__all__ = ["DEMO", "ITEMSIZE", "Defaults", "ModelInfo", "load", "of"]
