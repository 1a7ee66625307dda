"""The table of field cases: faults that broke other servers of this kind, each as one row.

A row says in words what goes in and what must come out; the coroutine under it does exactly that.  Where servers
differ in what is right, `policy` says what epdd does.
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
    """One row, and what does it."""

    id: str
    name: str
    goes_in: str
    comes_out: str
    drill: Drill | None = None      # None: done elsewhere or later, as `comes_out` says
    policy: str = ""                # what was decided where servers differ
    daemon: str = "shared"          # by whose settings: a key of conftest.SETTINGS
    kills: tuple[str, ...] = ()     # workers that the case itself ends
    repeats: int = 0                # so many more runs, after which nobody may have grown
    short: str = ""                 # what epdd does not reach yet: the drill must raise Short

    def __str__(self) -> str:
        return self.id

    def row(self, verdict: str, why: str = "") -> tuple[str, tuple[str, ...]]:
        """For the table that the run prints at its end."""
        text = why or self.short or f"{self.goes_in} -> {self.comes_out}"
        width = max(len(case.name) for case in CASES)
        return tables.row("field cases", self.id, verdict, f"{self.id:4}  {self.name:{width}}  {text}"[:LINE_MAX - 7])


class Short(Exception):
    """What a row says that epdd does not reach yet was seen."""


CASES: list[Case] = []


def case(id: str, name: str, goes_in: str, comes_out: str, **how: Any) -> Callable[[Drill], Drill]:
    """Puts the coroutine below it into the table."""
    def put(drill: Drill) -> Drill:
        CASES.append(Case(id, name, goes_in, comes_out, drill, **how))
        return drill
    return put


def elsewhere(id: str, name: str, goes_in: str, comes_out: str) -> None:
    """A row without a drill here."""
    CASES.append(Case(id, name, goes_in, comes_out))
