"""Headers of safetensors files: type, shape and position of each tensor.  Reads no weights."""

from __future__ import annotations

import codecs
import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from epdd.errors import ModelError
from epdd.families.files import read_json, refuse_pointer

HEADER_BYTES_MAX = 100 << 20        # what the format allows
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
        "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64,
        "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8}


# Types of weights that need no scales, and transformers' names for them; float64 is computed in float32.
DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Tensor:
    """One tensor as the header of a file describes it."""

    file: Path
    dtype: str                  # as safetensors spells it: "BF16", "F8_E4M3", ...
    shape: tuple[int, ...]
    start: int                  # its bytes are [start, end) of the file
    end: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def weight_files(root: Path) -> list[Path]:
    """The weights files that are loaded, as in transformers: model.safetensors, else the shards of the index.

    Other files in the folder (consolidated.safetensors, an adapter) are ignored.  Raises ModelError if there are no
    weights, or if a shard is missing.
    """
    return _files(root, _weight_map(root))


def _files(root: Path, listed: dict[str, str]) -> list[Path]:
    names = sorted(set(listed.values())) or [SINGLE]
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise ModelError(f"{root / missing[0]}: no such file, but {INDEX} names it ({len(missing)} of {len(names)} "
                         "shards are missing); download the missing files again")
    return [root / name for name in names]


def _weight_map(root: Path) -> dict[str, str]:
    """Tensor -> shard as the index says; empty if there is one model.safetensors.

    Raises ModelError, also if there is neither.
    """
    if (root / SINGLE).is_file():
        return {}
    if not (root / INDEX).is_file():
        raise ModelError(_no_weights(root)[1])
    index = read_json(root / INDEX)
    with (root / INDEX).open("rb") as file:
        # transformers reads this file itself and fails at a byte order mark; in all other files it does no harm.
        if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            raise ModelError(f"{root / INDEX}: begins with a byte order mark; save it without, or download it again")
    if not isinstance(index.get("metadata"), dict):     # transformers requires it
        raise ModelError(f"{root / INDEX}: metadata is no object; download the file again")
    found = index.get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise ModelError(f"{root / INDEX}: weight_map does not map tensors to files; download the file again")
    if any("/" in name or name.startswith(".") for name in found.values()):
        raise ModelError(f"{root / INDEX}: weight_map names a file outside the folder; download the file again")
    return found


def all_tensors(root: Path) -> dict[str, Tensor]:
    """Tensors of all files that are loaded.  Raises ModelError, also if index and shards disagree."""
    found: dict[str, Tensor] = {}
    listed = _weight_map(root)
    for path in _files(root, listed):
        for name, tensor in tensors(path).items():
            if name in found:
                raise ModelError(f"{path}: {name} is in {found[name].file.name} too; download the checkpoint again")
            found[name] = tensor
    if not listed:
        return found
    for name, file in listed.items():
        if name not in found or found[name].file.name != file:
            raise ModelError(f"{root / INDEX}: says that {name} is in {file}, where it is not; download the "
                             "checkpoint again")
    if missing := [name for name in found if name not in listed]:
        raise ModelError(f"{root / INDEX}: leaves out {missing[0]}, which {found[missing[0]].file.name} has "
                         f"(and {len(missing) - 1} more); download the file again")
    return found


def dtype(tensors: Mapping[str, Tensor]) -> str:
    """Type of the weights if config.json names none: the type of most elements."""
    counts = Counter[str]()
    for tensor in tensors.values():
        if tensor.dtype in DTYPES:
            counts[DTYPES[tensor.dtype]] += tensor.count
    return counts.most_common(1)[0][0] if counts else "float32"


def tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of one file.  Raises ModelError if it is not a safetensors file, or shorter than its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            length, = struct.unpack("<Q", file.read(8))
            if length > min(HEADER_BYTES_MAX, size - 8):
                raise ValueError("its header does not fit into it")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, struct.error, RecursionError):
        refuse_pointer(path)
        raise ModelError(f"{path}: not a safetensors file, or cut short ({size} bytes); download it again") from None
    return _checked(path, header, 8 + length, size)


def _checked(path: Path, header: object, offset: int, size: int) -> dict[str, Tensor]:
    """Tensors of a header.  The format requires that they fill the file without gap or overlap."""
    found: dict[str, Tensor] = {}
    try:
        assert isinstance(header, dict)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            tensor = Tensor(path, entry["dtype"], tuple(entry["shape"]), offset + start, offset + end)
            if any(side < 0 for side in tensor.shape) or (end - start) * 8 != tensor.count * BITS[tensor.dtype]:
                raise ModelError(f"{path}: {name} takes {end - start} bytes, which is not what its type {tensor.dtype} "
                                 f"and shape {list(tensor.shape)} need; download the file again")
            found[name] = tensor
    except (AssertionError, KeyError, TypeError, ValueError, AttributeError):
        raise ModelError(f"{path}: its header is damaged; download the file again") from None
    at = offset
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != at:
            raise ModelError(f"{path}: the bytes of {name} do not follow those before; download the file again")
        at = tensor.end
    if at != size:
        raise ModelError(f"{path}: {size} bytes long, but its header speaks of {at}; the file is "
                         f"{'cut short' if size < at else 'too long'}: download it again")
    return found


def no_model(root: Path) -> str:
    """Message: why a folder without config.json cannot be served, and what to do."""
    if root.is_file():
        return f"{root}: a file; name its folder, {root.parent}"
    if not root.is_dir():
        return f"{root}: no such folder; name a checkpoint's folder, or a model of the Hub as ORG/NAME"
    if (root / "snapshots").is_dir():
        return f"{root}: a model of the Hub's cache; name it as ORG/NAME, or one of the folders in {root / 'snapshots'}"
    kind, told = _no_weights(root)
    if kind in ("link", "GGUF", "adapter"):
        return told
    if below := sorted(path.parent.name for path in root.glob("*/config.json")):
        return f"{root}: holds no checkpoint, but {below[0]} in it has a config.json; name that folder"
    return f"{root / 'config.json'}: no such file; download it, every checkpoint has it"


def _no_weights(root: Path) -> tuple[str, str]:
    """Why there are no weights to load: the kind as one word, and a sentence that says what to do."""
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    for path in (root / name for name in (*names, "config.json")):
        if path.is_symlink() and not path.exists():
            return "link", (f"{path}: a link to {path.readlink()}, which is not there; copy the folder with the files "
                            "that its links point to (cp -L)")
    if any(name.endswith(".gguf") for name in names):
        return "GGUF", (f"{root}: holds only GGUF weights, which are not served; take the checkpoint with "
                        ".safetensors files")
    if any(name.endswith((".bin", ".pt", ".pth")) and "model" in name for name in names):
        return "bin", (f"{root}: holds weights only as PyTorch .bin files, which are not read (they can run code); "
                       "save it with transformers' save_pretrained, which writes .safetensors")
    if "adapter_config.json" in names:
        return "adapter", (f"{root}: holds an adapter (adapter_config.json) and no model; merge it into its base model "
                           "and save that")
    shards = [name for name in names if name.startswith("model-") and name.endswith(".safetensors")]
    if shards:
        return "index", f"{root / INDEX}: no such file, and {shards[0]} is a shard; download the index again"
    others = [name for name in names if name.endswith(".safetensors") and name != "adapter_model.safetensors"]
    if others:
        return "name", (f"{root}: no weights by a name that is read ({SINGLE} or {INDEX}), only "
                        f"{', '.join(others[:3])}; if that is the whole model in the Hugging Face layout, rename it to "
                        f"{SINGLE}")
    return "none", f"{root}: no weights (neither {SINGLE} nor {INDEX}); download the checkpoint again"
