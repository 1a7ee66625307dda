"""Markdown for the pages that tools/reference writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def note(source: str) -> str:
    return f"<!-- Made by tools/reference from {source}. Do not edit: run `make reference`. -->\n"


def escaped(text: str) -> str:
    """Text with `<` and `*` escaped."""
    return re.sub(r"([<*])", r"\\\1", text).replace("\n", " ")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
