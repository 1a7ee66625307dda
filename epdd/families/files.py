"""Reads a checkpoint's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from epdd.errors import ModelError


def read_json(path: Path, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object in a JSON file, with or without a byte order mark.

    Raises ModelError, also for a file that is not there unless `absent` says what it then stands for.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        if absent is not None:
            return absent
        raise ModelError(f"{path}: no such file; a checkpoint folder has it") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if path.read_bytes().startswith(b"version https://git-lfs"):
            raise ModelError(f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull`") from None
        raise ModelError(f"{path}: not JSON ({error}); download it again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: not a JSON object; download it again")
    return data
