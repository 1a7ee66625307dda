"""The request log: its lines, rotation, and that no disk blocks serving."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from epdd.errors import NoWorker, WorkerFailed
from epdd.ops import request_log
from epdd.ops.request_log import RequestLog

from tests.frontend.bench import Bench, hosted
from tests.frontend.http.test_app import raw

WAIT_S = 20.0


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def logging_to(path: Path, bytes_max: int = 1 << 20, kept: int = 2) -> Iterator[RequestLog]:
    log = RequestLog(path, bytes_max, kept)
    try:
        yield log
    finally:
        log.close()


def test_lines_are_appended_and_only_ours_to_read(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    for run in range(2):
        with logging_to(path) as log:
            for number in range(1000):
                log.write({"number": 1000 * run + number})
        assert (log.written, log.dropped) == (1000, 0)
    assert [line["number"] for line in lines(path)] == list(range(2000))
    assert path.stat().st_mode & 0o777 == 0o600


def test_full_files_are_kept_up_to_a_number(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    with logging_to(path, bytes_max=100, kept=2) as log:
        for number in range(50):
            log.write({"number": number})
            wait_for(lambda: log.written == number + 1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["requests", "requests.1", "requests.2"]
    assert all(file.stat().st_size <= 100 for file in tmp_path.iterdir())
    kept = [line["number"] for name in ("requests.2", "requests.1", "requests") for line in lines(tmp_path / name)]
    assert kept == list(range(kept[0], 50)) and log.dropped == 0


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    with logging_to(path) as log:
        log.write({"number": 1})
        wait_for(lambda: log.written == 1)
        path.rename(tmp_path / "moved")
        log.write({"number": 2})
        wait_for(lambda: log.written == 2)
        log.reopen()
        log.write({"number": 3})
    assert [line["number"] for line in lines(tmp_path / "moved")] == [1, 2]
    assert [line["number"] for line in lines(path)] == [3]


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "CLOSE_S", 0.1)
    path = tmp_path / "requests"
    os.mkfifo(path)             # opening it blocks, as on a dead network file system
    many = request_log.LINES_MAX + 1000
    with logging_to(path) as log:
        for number in range(many):
            log.write({"number": number})
        assert log.written == 0 and log.dropped >= 1000 - request_log.BATCH_MAX
        # The queue is full: closing does not wait for it either.
    assert [record.message for record in caplog.records] == [
        f"request log: lines are dropped: the disk is too slow, or hangs path={path}"]
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.extend(path.open("rb")), daemon=True)
    reader.start()
    wait_for(lambda: log.written + log.dropped == many)
    log._waiting.put(None)
    reader.join(WAIT_S)
    assert not reader.is_alive()
    assert len(found) == log.written and json.loads(found[0]) == {"number": 0}
    assert caplog.records[-1].message == f"request log: lines are written again dropped={log.dropped}"


def test_a_full_disk_costs_lines_and_leaves_none_in_halves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "requests"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    line = json.dumps({"number": 0}, separators=(",", ":")) + "\n"
    with logging_to(path) as log:
        # The kernel's own refusal, in the middle of the eleventh line; SIGXFSZ is ignored by Python.
        resource.setrlimit(resource.RLIMIT_FSIZE, (10 * len(line) + 5, before[1]))
        try:
            for count in range(1, 21):
                log.write({"number": 0})
                wait_for(lambda: log.written + log.dropped == count)
            assert (log.written, log.dropped) == (10, 10)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        log.write({"number": 1})
    whole = path.read_text().splitlines()
    assert whole[:10] == [line.strip()] * 10 and json.loads(whole[-1]) == {"number": 1} and len(whole) == 12
    assert len([record for record in caplog.records if "dropped: File too large" in record.message]) == 1


def test_no_folder_no_log_and_no_harm(tmp_path: Path) -> None:
    with logging_to(tmp_path / "nowhere" / "requests") as log:
        log.write({})
        wait_for(lambda: log.dropped == 1)
        (tmp_path / "nowhere").mkdir()
        log.write({"number": 1})
        wait_for(lambda: log.written == 1)


def test_a_line_tells_sizes_times_and_the_end_and_nothing_of_the_content(family: Any, tmp_path: Path) -> None:
    path = tmp_path / "requests"

    @hosted()
    async def test(bench: Bench) -> None:
        log = bench.context.stats.request_log = RequestLog(path, 1 << 20, 1)
        answer = await bench.http.post(
            f"{bench.url}/v1/chat/completions", headers={"Authorization": "Bearer sk-secret", "X-Request-ID": "mine"},
            json={"messages": [{"role": "user", "content": "secret question"}], "n": 2, "max_tokens": 2})
        assert answer.status == 200
        own = (await answer.json())["id"]
        await bench.frames()
        assert (await bench.chat(messages=[])).status == 400
        bench.script.play = bench.script.say("hello", fail=WorkerFailed("secret fault"))
        assert (await bench.frames())[-2]["error"]["code"] == "worker_failed"
        bench.door.refuse = NoWorker("none")
        assert (await bench.chat()).status == 503
        # Bytes that are not HTTP are no request.
        assert (await raw(bench, b"secret\r\n\r\n")).partition(b" ")[2].startswith(b"400 ")
        text = await (await bench.http.get(f"{bench.url}/metrics")).text()
        wait_for(lambda: log.written == 5)
        log.close()
        assert "epdd_request_log_lines_total" in text and "epdd_request_log_dropped_total 0.0" in text
        found = lines(path)
        first = found[0]
        assert (first["id"], first["client_id"], first["model"]) == (own, "mine", "tiny-vl")
        assert first["finish_reasons"] == ["length", "length"] and first["answer_tokens"] == 4
        assert 0 < first["ttft_s"] <= first["duration_s"] and abs(first["time"] - time.time()) < 60
        assert first["prompt_tokens"] > 5 and first["images"] == 0
        assert [(line["outcome"], line["status"], line["error"]) for line in found] == [
            ("completed", 200, None), ("completed", 200, None), ("rejected", 400, "invalid_request"),
            ("failed", 200, "worker_failed"), ("rejected", 503, "no_worker")]
        assert found[2]["ttft_s"] is None and found[2]["finish_reasons"] == []
        assert "secret" not in path.read_text() and "hello" not in path.read_text()

    test(family)
