"""The NVML stub, and the table of recorded machines at the run's end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tables
from tests.hardware import nvml


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def judge(record_property: Callable[[str, object], None]
          ) -> Callable[[str, str, dict[str, tuple[object, object]]], None]:
    """judge(machine, summary, {what: (found, expected)}): adds a row, and fails if a value differs."""
    def compare(machine: str, summary: str, checks: dict[str, tuple[object, object]]) -> None:
        wrong = [f"{what}: {found}, not {expected}" for what, (found, expected) in checks.items() if found != expected]
        record_property(*tables.row("recorded machines", machine, "WRONG" if wrong else "right",
                                    f"{machine:40}  {'; '.join(wrong) or summary}"))
        assert not wrong
    return compare
