"""The table of field cases: faults that broke other servers of this kind, each as one row.

A row describes the input and the required outcome; the coroutine below it tests exactly that.  If servers differ,
`policy` says what epdd does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests import tables
from tests.field.bench import Bench

LINE_MAX = 160
Drill = Callable[[Bench], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """One row and its coroutine."""

    id: str
    name: str
    goes_in: str
    comes_out: str
    drill: Drill | None = None      # None: tested elsewhere or later, as `comes_out` says
    policy: str = ""                # epdd's choice if servers differ
    daemon: str = "shared"          # its daemon: a key of conftest.SETTINGS
    kills: tuple[str, ...] = ()     # workers that the case kills
    repeats: int = 0                # more runs, over which no process may grow
    short: str = ""                 # a known gap: the case must raise Short

    def __str__(self) -> str:
        return self.id

    def row(self, verdict: str, why: str = "") -> tuple[str, tuple[str, ...]]:
        """For the table that the run prints at its end."""
        text = why or self.short or f"{self.goes_in} -> {self.comes_out}"
        width = max(len(case.name) for case in CASES)
        return tables.row("field cases", self.id, verdict, f"{self.id:4}  {self.name:{width}}  {text}"[:LINE_MAX - 7])


class Short(Exception):
    """The row's known gap was observed."""


CASES: list[Case] = []


def case(id: str, name: str, goes_in: str, comes_out: str, **how: Any) -> Callable[[Drill], Drill]:
    """Adds the decorated coroutine to the table."""
    def put(drill: Drill) -> Drill:
        CASES.append(Case(id, name, goes_in, comes_out, drill, **how))
        return drill
    return put


def elsewhere(id: str, name: str, goes_in: str, comes_out: str) -> None:
    """A row that is tested elsewhere."""
    CASES.append(Case(id, name, goes_in, comes_out))
