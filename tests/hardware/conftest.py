"""The NVML stub, built once, and the table of recorded machines that the run prints at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hardware import nvml

_TABLE = pytest.StashKey[list[tuple[str, str, list[str]]]]()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str, dict[str, tuple[object, object]]], None]]:
    """judge(machine, summary, {what: (found, expected)}): a row of the table, and a failure if anything differs."""
    def compare(machine: str, summary: str, checks: dict[str, tuple[object, object]]) -> None:
        wrong = [f"{what}: {found}, not {expected}" for what, (found, expected) in checks.items() if found != expected]
        request.config.stash.setdefault(_TABLE, []).append((machine, summary, wrong))
        assert not wrong
    yield compare


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_TABLE, [])
    if not rows:
        return
    terminalreporter.section("recorded machines")
    width = max(len(machine) for machine, _, _ in rows)
    for machine, summary, wrong in rows:
        verdict = "WRONG" if wrong else "right"
        terminalreporter.write_line(f"{verdict}  {machine:{width}}  {'; '.join(wrong) or summary}")
    right = sum(not wrong for _, _, wrong in rows)
    terminalreporter.write_line(f"{right} of {len(rows)} right")
