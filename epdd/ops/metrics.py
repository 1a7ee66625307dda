"""Counts, recent latencies and rates of requests.  The endpoints write them; the status and /metrics read them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from epdd.dispatch.request_record import RequestRecord
from epdd.errors import CapacityError, EpddError, RequestError
from epdd.fleet.rate import Rate
from epdd.ops.request_log import RequestLog, line

_WINDOW = 1024          # latest requests, of which percentiles are computed

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)


class Window:
    """Percentiles of the last values."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._count = 0
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._values.append(value)
        self._count += 1
        self._sum += value

    def snapshot(self) -> dict[str, float]:
        """`count` and `sum` are of all values since start, for means between two snapshots; zeros before the first."""
        ordered = sorted(self._values) or [0.0]
        last = len(ordered) - 1
        return {**{f"p{share}": ordered[round(last * share / 100)] for share in (50, 90, 99)}, "count": self._count,
                "sum": self._sum}


class RequestStats:
    """All requests since start.

    accepted: admitted.  Each request ends as completed, rejected (fault of the client, or no room), failed (fault of
    the server, also in mid-stream) or aborted (the client left).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, request_log: RequestLog | None = None) -> None:
        self.clock = clock
        self.request_log = request_log
        self.running = 0                            # received and not finished; not all are admitted
        self.counts: Counter[str] = Counter()       # accepted, completed, rejected, failed, aborted
        self.statuses: Counter[int] = Counter()     # HTTP answers of every endpoint
        self.errors: Counter[str] = Counter()       # code of the error, in mid-stream too
        self.gauges: dict[str, Callable[[], float]] = {}    # bytes in memory, by kind: bodies, images
        self.prompt_tokens = self.generated_tokens = self.images = self.ignored_fields = 0
        self.latency = Window()
        self.ttft = Window()
        self.token_rate = Rate(clock)
        self.image_rate = Rate(clock)
        self.registry = CollectorRegistry()
        self.latency_histogram = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its last token.", _SECONDS)
        self.ttft_histogram = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", _SECONDS)
        self.gap_histogram = self._histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of one answer.", _TOKEN_SECONDS)

    @contextmanager
    def request(self, name: str = "", client_id: str = "") -> Iterator[RequestRecord]:
        """Counts one request; how the block ends says how the request did."""
        record = RequestRecord(name, client_id, self.clock, self.clock())
        self.running += 1
        try:
            yield record
            if record.outcome == "running":
                record.outcome = "completed"
        except (CapacityError, RequestError) as error:
            record.outcome, record.status, record.code = "rejected", error.status, error.code
            raise
        except asyncio.CancelledError:
            record.abort()
            raise
        except Exception as error:
            known = error if isinstance(error, EpddError) else EpddError("")
            record.outcome, record.status, record.code = "failed", known.status, known.code
            raise
        finally:
            if self.request_log is not None:
                self.request_log.write(line(record))
            self.running -= 1
            self.counts[record.outcome] += 1
            if record.outcome == "completed":
                self.latency.add(record.age())
                self.latency_histogram.observe(record.age())

    def prompt(self, record: RequestRecord, ignored_fields: int) -> None:
        """The request is valid."""
        self.prompt_tokens += record.prompt_tokens
        self.images += len(record.images)
        self.image_rate.add(len(record.images))
        self.ignored_fields += ignored_fields

    def tokens(self, record: RequestRecord, choice: int, count: int) -> None:
        """`count` tokens of a choice came together."""
        if not count:
            return
        now = self.clock()
        record.answer_tokens += count
        self.generated_tokens += count
        self.token_rate.add(count)
        if record.ttft_s is None:
            record.ttft_s = now - record.arrived
            self.ttft.add(record.ttft_s)
            self.ttft_histogram.observe(record.ttft_s)
        elif choice in record.last_tokens:
            self.gap_histogram.observe((now - record.last_tokens[choice]) / count)
        record.last_tokens[choice] = now

    def broken(self, record: RequestRecord, code: str) -> None:
        """A stream ended with an error of this code, after its header was sent."""
        record.outcome, record.code = "failed", code
        self.errors[code] += 1

    def snapshot(self) -> dict[str, Any]:
        """The "requests" part of the daemon's status."""
        return {
            "running": self.running,
            **{name: self.counts[name] for name in ("accepted", "completed", "failed", "rejected", "aborted")},
            "latency_s": self.latency.snapshot(),
            "ttft_s": self.ttft.snapshot(),
            "tokens_per_s": self.token_rate.value(),
            "images_per_s": self.image_rate.value(),
        }

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"epdd_{name}", text, buckets=buckets, registry=self.registry)
