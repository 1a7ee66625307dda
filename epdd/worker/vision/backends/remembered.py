"""What a machine measured for a model, in a small file, so that a worker that starts again need not measure.

Losing the file, or not being able to write it, costs that measurement and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from epdd import __version__, wire
from epdd.worker.kernels import cuda

log = logging.getLogger(__name__)


class Known(msgspec.Struct, frozen=True):
    """An outcome: which backend, and how all did."""

    backend: str
    trials: tuple[wire.Trial, ...]


class Memory:
    """The file of one machine, model and set of settings."""

    def __init__(self, folder: Path | None, facts: Mapping[str, Any]) -> None:
        """`facts` is all that the outcome depends on; another fact is another file.  Without a folder: no memory."""
        digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
        self.path = None if folder is None else folder / f"encoder-{digest}.json"

    def read(self) -> Known | None:
        """What was remembered; None where nothing, or nothing readable, is."""
        if self.path is None:
            return None
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Known)
        except (OSError, msgspec.MsgspecError):
            return None

    def write(self, known: Known) -> None:
        """Remember, whole or not at all: several workers may do so at once."""
        if self.path is None:
            return
        draft = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)     # whatever the umask
            draft.write_bytes(msgspec.json.encode(known))
            draft.replace(self.path)
        except OSError as error:
            log.debug("%s is not remembered: %s", self.path, error)
            with contextlib.suppress(OSError):
                draft.unlink()


def folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """systemd's CacheDirectory, else the user's; None for users without a home."""
    environ = os.environ if environ is None else environ
    if environ.get("CACHE_DIRECTORY"):
        return Path(environ["CACHE_DIRECTORY"].split(":")[0])
    base = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else "")
    return Path(base) / "epdd" if base else None


def facts(spec: wire.WorkerSpec, dtype: str, backends: Sequence[str], missing: Mapping[str, str]) -> dict[str, Any]:
    """All that the outcome depends on: code, device, threads, checkpoint, settings, and what else is installed."""
    device = _processor() if spec.device == "cpu" else cuda.card(spec.device)
    return {"epdd": __version__, "torch": torch.__version__, "device": device, "threads": torch.get_num_threads(),
            "checkpoint": _checkpoint(Path(spec.model)), "dtype": dtype,
            "backends": list(backends), "missing": dict(missing)}


def _processor() -> list[str]:
    """Model and flags of the first CPU."""
    with open("/proc/cpuinfo") as file:
        first = file.read().partition("\n\n")[0]
    return [line for line in first.splitlines() if line.startswith(("model name", "flags", "Features"))]


def _checkpoint(root: Path) -> list[Any]:
    """Its files' names, sizes and times: a copy of the same bytes is measured anew, which is no harm."""
    files = sorted((*root.glob("config.json"), *root.glob("*.safetensors")))
    return [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path in files for stat in (path.stat(),)]
