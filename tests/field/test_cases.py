"""Runs the table: every case against a real daemon, and after each the same checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.daemon import Daemon
from tests.field import oracle  # noqa: F401
from tests.field.cases import api, caches, connections, getting, gpu_faults, pixels, processes, prompts  # noqa: F401
from tests.field.bench import Bench
from tests.field.table import CASES, Case, Short
from tests.field.web import Host

pytestmark = pytest.mark.takes(250)

_ORDER = ("shared", "small", "impatient", "text", "gpu")
_TEXTS: dict[str, str] = {}
_AT_REST: dict[str, dict[str, Any]] = {}
_RUN = sorted((case for case in CASES if case.drill), key=lambda case: (_ORDER.index(case.daemon), case.id))


@pytest.mark.parametrize("case", _RUN, ids=str)
async def test_case(case: Case, start: Callable[[str], Daemon], host: Host, folder: Path,
                    record_property: Callable[[str, object], None]) -> None:
    daemon = start(case.daemon)
    connector = aiohttp.TCPConnector(force_close=True, limit=0)     # else the test's own idle connections would count
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as http:
        bench = Bench(daemon, host, folder, http)
        sees = case.daemon != "text"
        if case.daemon not in _TEXTS:
            await oracle.served(bench, sees)
            _TEXTS[case.daemon] = await oracle.expected_text(bench)
        if not case.short:
            # Workers report once a second: the numbers after one case are those before the next.
            before = _AT_REST.pop(case.daemon, None) or await oracle.at_rest(bench)
            _AT_REST[case.daemon] = await oracle.judge(bench, case, before, _TEXTS[case.daemon], sees)
            record_property("ready_s", bench.ready_s)
            return
        assert case.drill is not None
        with pytest.raises(Short):      # once the gap is closed, the row must say so
            await case.drill(bench)
        pytest.xfail(case.short)


def test_the_table_is_whole(record_property: Callable[[str, object], None]) -> None:
    for case in CASES:
        if case.drill is None:
            record_property(*case.row("later"))
    ids = [case.id for case in CASES]
    assert len(ids) == len(set(ids))
    assert {f"D{number:02}" for number in range(1, 48)} == {id[:3] for id in ids if id[0] == "D"}
