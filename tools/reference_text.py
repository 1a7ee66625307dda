"""Markdown for the pages that tools/reference.py writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def note(source: str) -> str:
    return f"<!-- Made by tools/reference.py from {source}. Do not edit: run `make reference`. -->\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
