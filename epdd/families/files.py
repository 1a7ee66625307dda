"""Reads the JSON files of a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from epdd.errors import ModelError


def read_json(path: Path, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object in a JSON file, with or without a byte order mark; `absent` if the file does not exist.

    Raises ModelError, also for a missing file if `absent` is None.
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
        refuse_pointer(path)
        raise ModelError(f"{path}: not JSON ({error}); download it again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: not a JSON object; download it again")
    return data


def refuse_pointer(path: Path) -> None:
    """Raises ModelError if the file is only a Git LFS pointer."""
    with path.open("rb") as file:
        if file.read(64).startswith(b"version https://git-lfs"):
            raise ModelError(f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull` in the folder")


class Fields:
    """Fields of a JSON file, or of an object in it, read with a check of their type.  null counts as absent."""

    def __init__(self, path: Path, absent: dict[str, Any] | None = None) -> None:
        """Raises ModelError, also for a missing file if `absent` is None."""
        self.path = path
        self.data = read_json(path, absent)     # the object as it is in the file
        self._prefix = ""

    def part(self, key: str) -> Fields:
        """The object under `key`.  Raises ModelError if there is none."""
        data = self.data.get(key)
        if not isinstance(data, dict):
            raise self.wrong(key, "an object")
        part = Fields.__new__(Fields)
        part.path, part.data, part._prefix = self.path, data, f"{self._prefix}{key}."
        return part

    def get(self, key: str, absent: Any = None) -> Any:
        """The value as it is in the file, without a check; `absent` if it is missing."""
        return self.data.get(key, absent)

    def has(self, key: str) -> bool:
        """Whether the field exists, even if it is null."""
        return key in self.data

    def whole(self, key: str, absent: int | None = None, least: int = 0) -> int:
        """A whole number of at least `least`.  Raises ModelError."""
        value = self.data.get(key)
        value = absent if value is None else value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"a whole number of at least {least}")
        return value

    def number(self, key: str, absent: float) -> float:
        """A number, not negative.  Raises ModelError."""
        value = self.data.get(key)
        value = absent if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise self.wrong(key, "a number of at least 0")
        return float(value)

    def tokens(self, key: str) -> list[int]:
        """Token ids, one or a list; -1 stands for none.  Raises ModelError."""
        return [token for token in self.wholes(key, least=-1) if token >= 0]

    def wholes(self, key: str, least: int = 0) -> list[int]:
        """A list of whole numbers, or one number as a list.  Raises ModelError."""
        value = self.data.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < least for item in values):
            raise self.wrong(key, "a whole number, or a list of them")
        return list(values)

    def flag(self, key: str, absent: bool) -> bool:
        """true or false.  Raises ModelError."""
        value = self.data.get(key)
        value = absent if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def wrong(self, key: str, wanted: str) -> ModelError:
        """The error that `key` is missing or is not what is `wanted`."""
        value = self.data.get(key)
        have = "is missing" if key not in self.data else f"is {json.dumps(value)[:80]}"
        return ModelError(f"{self.path}: {self._prefix}{key} {have}; {wanted} is expected, as in the original "
                          "checkpoint")
