"""Daemons that cases share, and a row of the table for each case."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, running
from tests.field import web
from tests.field.table import Case

# Name -> settings.  Nearly all cases use the shared daemon.
SETTINGS: dict[str, dict[str, object]] = {
    "shared": {"encoder__workers": 2, "media__fetch": "allowlist", "media__timeout_s": 4, "fleet__stall_s": 15},
    # Low limits, and images from public addresses, which is the default.
    "small": {"encoder__workers": 1, "model__max_model_len": 128, "arena__bytes": 40 << 10,
              "server__max_body_bytes": 8 << 20,
              "server__max_requests": 16},
    # Long enough for a client on a busy machine to send its request.
    "impatient": {"encoder__workers": 1, "server__head_timeout_s": 3, "server__body_timeout_s": 3},
    "text": {"encoder__workers": 1, "media__max_images": 0},
    # One GPU, which is a fake, shared by an encoder and a prefill-decode worker.
    "gpu": {"program": "tests.field.gpu_daemon", "encoder__workers": "gpu:1,cpu:1", "pd__workers": "gpu:1"},
}


@pytest.fixture(scope="session")
def host() -> Iterator[web.Host]:
    with web.hosting() as host:
        yield host


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below it the small daemon reads images."""
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="session")
def start(host: web.Host, folder: Path) -> Iterator[Callable[[str], Daemon]]:
    """start(name): the daemon with these settings.  One runs at a time: the cores are few."""
    with ExitStack() as stack:
        now: dict[str, Daemon] = {}

        def get(name: str) -> Daemon:
            if name not in now:
                stack.close()
                now.clear()
                allowed = f"127.0.0.1:{host.server_address[1]},127.0.0.1:1,no-such-host.invalid"
                settings = {"media__allow": allowed, **SETTINGS[name]}
                if name == "small":
                    settings["media__folders"] = folder
                now[name] = stack.enter_context(running(**settings)).ready()
            return now[name]

        yield get


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]
                              ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")
    if isinstance(case, Case) and (report.when == "call" or report.failed):
        short = bool(case.short) and report.outcome == "skipped"
        verdict = "short" if short else {"passed": "right", "failed": "WRONG"}.get(report.outcome, report.outcome)
        why = repr(call.excinfo.value) if report.failed and call.excinfo else ""
        ready_s = dict(report.user_properties).get("ready_s")
        if ready_s is not None:
            why = f"READY again after {ready_s:.1f} s: {case.goes_in} -> {case.comes_out}"
        report.user_properties.append(case.row(verdict, why))
    return report
