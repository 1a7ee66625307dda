"""How large a checkpoint's halves are, by the headers of its safetensors files; no weight is read."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

HEADER_BYTES_MAX = 100 << 20        # what the format allows


def parameters(root: Path) -> tuple[int, int]:
    """Parameters of the vision tower and of the language model; (0, 0) where the files cannot be read.

    A checkpoint that cannot be loaded is for whoever loads it to refuse.
    """
    vision = language = 0
    try:
        for path in sorted(root.glob("*.safetensors")):
            for name, tensor in _header(path).items():
                count = math.prod(tensor["shape"]) if name != "__metadata__" else 0
                if "visual." in name:
                    vision += count
                else:
                    language += count
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return 0, 0
    return vision, language


def _header(path: Path) -> dict[str, dict[str, list[int]]]:
    with path.open("rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        if size > HEADER_BYTES_MAX:
            raise ValueError("not a safetensors file")
        header: dict[str, dict[str, list[int]]] = json.loads(file.read(size))
    return header
