"""A checkpoint's files, told from little of their content: how large its halves are, and whether they are the same.

A worker that comes back reads the files anew.  Were they other ones by then, it would answer as another model than its
peers, or read embeddings that were made by another vision tower.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from pathlib import Path

from epdd.errors import ModelError

SAMPLES = 64                # of each file, evenly spread: other weights differ nearly everywhere
SAMPLE_BYTES = 4096
HEADER_BYTES_MAX = 100 << 20        # what the format allows
SETTINGS = ("config.json", "preprocessor_config.json", "model.safetensors.index.json")


def identity(folder: str) -> str:
    """A digest of the settings and of samples of every weights file; the same for a copy.  Raises ModelError."""
    digest = hashlib.blake2b(digest_size=16)
    root = Path(folder)
    try:
        for path in (root / name for name in SETTINGS):
            if path.is_file():
                digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
        for path in sorted(root.glob("*.safetensors")):
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size}\n".encode())
                for i in range(SAMPLES):
                    at = i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1)
                    digest.update(os.pread(file.fileno(), SAMPLE_BYTES, at))
    except OSError as error:
        raise ModelError(f"{folder}: weights cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def check(folder: str, expected: str) -> None:
    """Raises ModelError if the files are not those of `expected`; an empty one expects nothing."""
    if expected and identity(folder) != expected:
        raise ModelError(f"{folder}: weights cannot be loaded: the files are not those that the daemon began with; "
                         "put them back, or restart the daemon to serve the new ones")


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
