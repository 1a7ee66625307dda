"""One look at a model folder: what it is, what it needs, whether it can be served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from epdd import families
from epdd.checkpoint import headers
from epdd.checkpoint.headers import Tensor
from epdd.families import ITEMSIZE, Family
from epdd.families.files import read_json


@dataclass(frozen=True)
class Look:
    """What lies in a folder that can be served."""

    folder: str
    name: str                       # of the model in the API, unless model.name gives another
    family: Family                  # with its parameters counted
    dtype: str                      # of the weights, dequantised: "bfloat16", "float16" or "float32"
    quantization: str = "none"      # how the files hold them, in words
    files: tuple[str, ...] = ()     # names of the weight files that are loaded
    file_bytes: int = 0             # of those
    warnings: tuple[str, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def vision_bytes(self) -> int:
        """Of the vision half's weights in `dtype`, dequantised; twice that where CPUs compute them in float32."""
        return self.family.parameters[0] * ITEMSIZE[self.dtype]

    @property
    def language_bytes(self) -> int:
        """Likewise of the language half's."""
        return self.family.parameters[1] * ITEMSIZE[self.dtype]


def look(folder: str) -> Look:
    """Look at the whole folder.  Raises ModelError: one sentence with the file, what is wrong, and what to do."""
    root = Path(folder)
    config: dict[str, Any] = read_json(root / "config.json")
    family = families.load(folder)
    files = headers.weight_files(root)
    tensors = {name: tensor for path in files for name, tensor in headers.tensors(path).items()}
    del config      # its quantisation is looked at here
    return Look(folder=folder, name=root.resolve().name, family=replace(family, parameters=_parameters(tensors)),
                dtype=family.stored if family.stored in ITEMSIZE else "float32",
                files=tuple(path.name for path in files), file_bytes=sum(path.stat().st_size for path in files),
                tensors=tensors)


def _parameters(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Numbers in the vision tower and in the language model.  All families call their tower "visual"."""
    vision = sum(tensor.count for name, tensor in tensors.items() if "visual." in name)
    return vision, sum(tensor.count for tensor in tensors.values()) - vision
