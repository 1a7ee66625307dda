"""Checks that the files of a checkpoint have not changed since the start of the daemon, by samples of their content.

A worker that restarts reads the files again.  If they have changed, it would be another model than the other workers,
or read embeddings of another vision tower.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from epdd.errors import ModelError

SAMPLES = 64                # of each file, evenly spread: other weights differ almost everywhere
SAMPLE_BYTES = 4096
SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json", "model.safetensors.index.json")


def digest(folder: str) -> str:
    """A digest of the settings and of samples of each weights file; a copy has the same digest.  Raises ModelError."""
    found = hashlib.blake2b(digest_size=16)
    root = Path(folder)
    try:
        for path in (root / name for name in SETTINGS):
            if path.is_file():
                found.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
        for path in sorted(root.glob("*.safetensors")):
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                found.update(f"{path.name} {size}\n".encode())
                for i in range(SAMPLES):
                    at = i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1)
                    found.update(os.pread(file.fileno(), SAMPLE_BYTES, at))
    except OSError as error:
        raise ModelError(f"{folder}: weights cannot be read: {error.strerror}") from None
    return found.hexdigest()


def check(folder: str, expected: str) -> None:
    """Raises ModelError if the digest of the files is not `expected`.  Empty: no check."""
    if expected and digest(folder) != expected:
        raise ModelError(f"{folder}: weights cannot be loaded: the files are not those that the daemon began with; "
                         "put them back, or restart the daemon to serve the new ones")
