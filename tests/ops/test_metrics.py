"""Counts, percentiles and rates of requests."""

from __future__ import annotations

import asyncio

import pytest

from epdd.dispatch.request_record import ImageRecord
from epdd.errors import BadRequest, NoWorker, WorkerFailed
from epdd.ops.metrics import RequestStats, Window


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_percentiles() -> None:
    window = Window()
    assert window.snapshot() == {"p50": 0.0, "p90": 0.0, "p99": 0.0, "count": 0, "sum": 0.0}
    for value in range(100, -1, -1):
        window.add(value)
    assert window.snapshot() == {"p50": 50, "p90": 90, "p99": 99, "count": 101, "sum": 5050}
    for _ in range(5000):
        window.add(7)
    assert window.snapshot() == {"p50": 7, "p90": 7, "p99": 7, "count": 5101, "sum": 40050}


@pytest.mark.parametrize(("error", "outcome"), [
    (None, "completed"), (BadRequest("x"), "rejected"), (NoWorker("x"), "rejected"), (WorkerFailed("x"), "failed"),
    (ValueError("x"), "failed"), (asyncio.CancelledError(), "aborted"),
])
def test_every_request_ends_once(error: BaseException | None, outcome: str) -> None:
    stats = RequestStats()
    try:
        with stats.request():
            assert stats.running == 1
            stats.counts["accepted"] += 1
            if error is not None:
                raise error
    except BaseException as caught:
        assert caught is error
    assert stats.running == 0
    assert dict(stats.counts) == {"accepted": 1, outcome: 1}
    assert stats.latency.snapshot()["count"] == (outcome == "completed")


def test_a_request_in_numbers() -> None:
    clock = Clock()
    stats = RequestStats(clock)
    with stats.request() as record:
        stats.counts["accepted"] += 1
        record.prompt_tokens, record.images = 40, [ImageRecord(64, 16)] * 2
        stats.prompt(record, 3)
        clock.now += 1.5
        stats.tokens(record, 0, 0)         # no token, no first token
        stats.tokens(record, 0, 2)
        clock.now += 0.25
        stats.tokens(record, 1, 1)         # another choice's first: no gap
        stats.tokens(record, 0, 1)
        clock.now += 1.25
    found = stats.snapshot()
    assert found["latency_s"] == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "count": 1, "sum": 3.0}
    assert found["ttft_s"]["p50"] == 1.5
    assert (found["running"], found["accepted"], found["completed"]) == (0, 1, 1)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.images, stats.ignored_fields) == (40, 4, 2, 3)
    sample = stats.registry.get_sample_value
    assert sample("epdd_inter_token_latency_seconds_count") == 1
    assert sample("epdd_inter_token_latency_seconds_sum") == 0.25
    assert sample("epdd_time_to_first_token_seconds_sum") == 1.5
    assert sample("epdd_e2e_request_latency_seconds_sum") == 3.0


def test_a_broken_stream_is_no_success() -> None:
    stats = RequestStats()
    with stats.request() as record:
        stats.broken(record, "worker_lost")
    with stats.request() as record:
        record.abort()
    assert dict(stats.counts) == {"failed": 1, "aborted": 1} and dict(stats.errors) == {"worker_lost": 1}
    assert stats.latency.snapshot()["count"] == 0
