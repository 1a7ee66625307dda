"""`epdd check`: facts of a checkpoint as text or JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from epdd import checkpoint
from epdd.checkpoint import Look
from epdd.errors import ModelError
from epdd.families import ITEMSIZE
from epdd.hub.bars import size


def run(name: str, folder: str, as_json: bool) -> int:
    """Print the facts of the checkpoint in `folder`, which was asked for as `name`.  Returns 0.  Raises ModelError."""
    try:
        found = checkpoint.look(folder)
    except ModelError as error:
        if as_json:
            print(json.dumps({"model": name, "folder": folder, "served": False, "why": error.message}, indent=2))
        raise
    if as_json:
        print(json.dumps(facts(name, found), indent=2))
        return 0
    for title, text in lines(name, found):
        print(f"{title:<14}{text}")
    for warning in found.warnings:
        print(f"epdd: {warning}", file=sys.stderr)
    return 0


def facts(name: str, found: Look) -> dict[str, Any]:
    """All facts, for JSON."""
    family = found.family
    vision, language = family.parameters
    return {"model": name, "folder": found.folder, "served": True, "family": family.model_type,
            "parameters": {"vision": vision, "language": language}, "dtype": found.dtype,
            "quantization": found.quantization, "context_max": family.max_model_len,
            "image_tokens_max": family.rows_max, "files": list(found.files), "file_bytes": found.file_bytes,
            "bytes": {"vision": found.vision_bytes, "language": found.language_bytes},
            "kv_bytes_per_token": _kv_bytes(found), "warnings": list(found.warnings)}


def lines(name: str, found: Look) -> list[tuple[str, str]]:
    """The facts as (title, text)."""
    family = found.family
    vision, language = family.parameters
    files = f"{len(found.files)} safetensors file{'s' if len(found.files) > 1 else ''}, {size(found.file_bytes)}"
    quantized = "" if found.quantization == "none" else f", stored as {found.quantization}"
    return [("model", name), ("folder", found.folder), ("family", family.model_type),
            ("parameters", f"{count(vision)} vision, {count(language)} language"),
            ("dtype", found.dtype + quantized), ("files", files),
            ("memory", f"{size(found.vision_bytes)} for each encoder, {size(found.language_bytes)} for each "
             f"prefill-decode worker, and {size(1000 * _kv_bytes(found))} for 1,000 tokens of KV cache; twice that for "
             "16-bit types on CPUs that compute in float32"),
            ("context", f"{family.max_model_len:,} tokens; an image is at most {family.rows_max:,} of them"),
            ("served", "yes")]


def _kv_bytes(found: Look) -> int:
    """Bytes of one token's keys and values in the type of the weights."""
    return found.family.kv_numbers * ITEMSIZE[found.dtype]


def count(number: int) -> str:
    """Number of parameters, as "7.62 billion"."""
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"
