"""Tables that a run prints at its end.

A row is a property of its test's report, so it reaches the process that prints.
"""

from __future__ import annotations

import pytest

ROW = "row of a table"


def row(table: str, key: str, verdict: str, line: str) -> tuple[str, tuple[str, ...]]:
    """A property for `record_property` or a report; of rows with the same key the last one counts."""
    return ROW, (table, key, verdict, line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tables: dict[str, dict[str, tuple[str, str]]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == ROW:
                    table, key, verdict, line = value
                    tables.setdefault(table, {})[key] = verdict, line
    for table, rows in tables.items():
        terminalreporter.section(table)
        counts: dict[str, int] = {}
        for key in sorted(rows):
            verdict, line = rows[key]
            counts[verdict] = counts.get(verdict, 0) + 1
            terminalreporter.write_line(f"{verdict:5}  {line}")
        terminalreporter.write_line(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
