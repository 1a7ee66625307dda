"""Reads small files under /sys and /proc.  If a file is missing or malformed, the result is None.

Only `text` and `names` access the filesystem.
"""

from __future__ import annotations

from pathlib import Path

NUMBER_MAX = 1 << 16        # above any CPU or node number of Linux; a file with "0-4294967295" must not fill memory


def text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def number(path: Path) -> int | None:
    content = text(path)
    try:
        return None if content is None else int(content)
    except ValueError:
        return None


def numbers(path: Path) -> set[int] | None:
    """A list like "0-3,8"; an empty file is the empty set."""
    content = text(path)
    return None if content is None else parse(content)


def mask(path: Path) -> set[int] | None:
    """The set bits of a map like "0000,00000000,000000c0": 32 bits a word, the highest first."""
    content = text(path)
    try:
        bits = None if content is None else int(content.replace(",", ""), 16)
    except ValueError:
        return None
    return None if bits is None else {i for i in range(min(bits.bit_length(), NUMBER_MAX)) if bits >> i & 1}


def parse(content: str) -> set[int] | None:
    """The numbers of "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, content.strip().split(",")):
        low, _, high = part.partition("-")
        try:
            first, last = int(low), int(high or low)
        except ValueError:
            return None
        if not 0 <= first <= last <= NUMBER_MAX:
            return None
        found.update(range(first, last + 1))
    return found


def names(folder: Path) -> list[str]:
    """The entries of a folder; none if it is missing."""
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """The entries `prefix`N of a folder, by N, ascending."""
    ids = sorted(int(name[len(prefix):]) for name in names(folder)
                 if name.startswith(prefix) and name[len(prefix):].isdecimal())
    return {i: folder / f"{prefix}{i}" for i in ids}
