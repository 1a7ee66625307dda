"""`/metrics`: requests and the daemon's status in Prometheus' text format.  Labels name workers, states
and settings only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epdd import log
from epdd.ops.metrics import RequestStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Status = dict[str, Any]

# (name, help, section of the status, key).  Each text makes sense without its neighbours: Grafana shows one at a time.
GAUGES = (
    ("uptime_seconds", "Seconds since the daemon started.", None, "uptime_s"),
    ("encode_queue_jobs", "Images waiting for an encoder.", "router", "queue_jobs"),
    ("encode_queue_cost", "Work in the images waiting for an encoder, in router.unit (patches by default).", "router",
     "queue_cost"),
    ("encode_queue_oldest_seconds", "Seconds that the oldest waiting image has waited for an encoder.", "router",
     "oldest_s"),
    ("router_budget_cpu", "Work that policy budget lets all CPU encoders together have in flight, in router.unit.",
     "router", "budget_cpu"),
    ("router_slack", "Order of the encode queue (router.slack): 0 is first come, first served; with more, small "
     "requests pass large ones.", "router", "slack"),
    ("router_ratio", "Capability ratio in force: speed of a GPU encoder divided by that of a CPU encoder.", "router",
     "ratio"),
    ("router_ratio_set", "Capability ratio GPU : CPU as set by the operator.", "router", "ratio_set"),
    ("router_ratio_measured", "Capability ratio GPU : CPU as measured.", "router", "ratio_measured"),
    ("arena_bytes", "Size of the arena, the shared memory that embeddings lie in.", "arena", "bytes"),
    ("arena_huge_bytes", "Arena bytes that lie in huge pages.", "arena", "huge_bytes"),
    ("arena_used_bytes", "Arena bytes in use by requests or by cached embeddings.", "arena", "used_bytes"),
    ("arena_pinned_bytes", "Arena bytes in use by requests, which cannot be evicted.", "arena", "pinned_bytes"),
    ("arena_leases", "Leases of arena bytes, those of cached embeddings included.", "arena", "leases"),
    ("arena_waiting", "Requests waiting for free arena bytes.", "arena", "waiting"),
    ("cache_entries", "Embeddings in the encoder cache that no request uses.", "cache", "entries"),
    ("cache_bytes", "Arena bytes of cached embeddings that no request uses.", "cache", "bytes"),
    ("poison_entries", "Images and prompts that are rejected because two workers crashed on each.", "poison",
     "entries"),
)
COUNTERS = (
    ("cache_hits", "Images whose embedding was in the encoder cache.", "cache", "hits"),
    ("cache_misses", "Images that had to be encoded.", "cache", "misses"),
    ("cache_joined", "Images that another request was already encoding, so both used one result.", "cache", "joined"),
    ("cache_evictions", "Embeddings dropped from the encoder cache to make room.", "cache", "evictions"),
    ("poison_images", "Images found to crash encoders.", "poison", "images"),
    ("poison_prompts", "Prompts found to crash prefill-decode workers.", "poison", "prompts"),
    ("poison_refused", "Requests rejected because workers crashed on their image or prompt before.", "poison",
     "refused"),
)
_WORKER_GAUGES = (
    ("worker_in_flight", "Images or requests that the worker has and has not finished.", "in_flight"),
    ("worker_in_flight_cost", "Work that the worker has and has not finished: patches in an encoder, tokens in a "
     "prefill-decode worker.", "in_flight_cost"),
    ("worker_resident_bytes", "Resident memory of the worker's process.", "rss_bytes"),
)
_ROLE_GAUGES = (
    ("worker_share", "Share of all patches of about the last minute that this encoder encoded, 0 to 1.", "share"),
    ("worker_slowness", "Measured encoding time divided by the time model from the encoder's start; 1: as predicted.",
     "slowness"),
    ("worker_kv_cached", "Tokens of former prompts and answers kept in unused KV cache.", "kv_cached"),
)
_ROUTER_LABELS = ("policy", "unit")
_WORKER_COUNTERS = (
    ("worker_done", "Images or requests that the worker finished.", "done"),
    ("worker_failed", "Images or requests that failed in the worker.", "failed"),
    ("worker_restarts", "Restarts of the worker's process.", "restarts"),
)


class ConnectionCounts(Protocol):
    """Counts of the HTTP server's connections; the length is the number of open ones."""

    closed: Counter[str]    # by the server, for each reason
    exhausted: int          # checks that found no free file descriptor

    def __len__(self) -> int: ...


class Exposition:
    """The metrics of one daemon."""

    def __init__(self, stats: RequestStats, connections: ConnectionCounts, status: Callable[[], _Status]) -> None:
        self._stats = stats
        self._status = _StatusCollector(stats, connections, status)

    def text(self) -> bytes:
        return generate_latest(self._stats.registry) + generate_latest(self._status)


class _StatusCollector(Collector):
    """Reads everything at the scrape, so no gauge is out of date."""

    def __init__(self, stats: RequestStats, connections: ConnectionCounts, status: Callable[[], _Status]) -> None:
        self._stats = stats
        self._connections = connections
        self._read = status

    def collect(self) -> Iterator[Metric]:
        status = self._read()
        yield from self._requests()
        yield from _simple(status)
        if emulated := status.get("emulated"):
            yield _labelled(GaugeMetricFamily, "emulated", "1 if the devices are emulated; labels name the profile.",
                            ("profile", "answers", "scale"),
                            {(emulated["profile"], emulated["answers"], f"{emulated['scale']:g}"): 1})
        yield from _workers(status.get("workers", []), status.get("router", {}))

    def _requests(self) -> Iterator[Metric]:
        stats = self._stats
        yield GaugeMetricFamily("epdd_num_requests_running", "Requests received and not finished.", stats.running)
        yield _labelled(
            CounterMetricFamily, "requests", "Finished requests by outcome: completed, failed (fault of the server), "
            "rejected (fault of the client, or no room), aborted (the client left).", ("outcome",),
            {(outcome,): stats.counts[outcome] for outcome in ("completed", "failed", "rejected", "aborted")})
        yield _labelled(CounterMetricFamily, "http_responses", "HTTP responses of all endpoints, by status.",
                        ("status",),
                        {(str(status),): count for status, count in sorted(stats.statuses.items())})
        yield _labelled(CounterMetricFamily, "errors", "Errors sent to clients, by error code.", ("code",),
                        {(code,): count for code, count in sorted(stats.errors.items())})
        yield CounterMetricFamily("epdd_log_dropped", "Log lines dropped because stderr was not read in time.",
                                  log.output().dropped)
        if stats.request_log is not None:
            yield CounterMetricFamily("epdd_request_log_lines", "Lines written to the request log.",
                                      stats.request_log.written)
            yield CounterMetricFamily("epdd_request_log_dropped", "Lines of the request log dropped because the disk "
                                      "was full or too slow.", stats.request_log.dropped)
        yield from self._http()
        yield _labelled(GaugeMetricFamily, "held_bytes", "Bytes of request bodies and image files in memory.",
                        ("what",),
                        {(what,): read() for what, read in stats.gauges.items()})
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens, image tokens included.", stats.prompt_tokens),
            ("generation_tokens", "Generated tokens.", stats.generated_tokens),
            ("images", "Images in requests.", stats.images),
            ("ignored_fields", "Request fields without effect, unknown fields included.", stats.ignored_fields),
        ):
            yield CounterMetricFamily(f"epdd_{name}", text, value)

    def _http(self) -> Iterator[Metric]:
        connections = self._connections
        yield GaugeMetricFamily("epdd_http_connections", "Open HTTP connections.", len(connections))
        yield _labelled(
            CounterMetricFamily, "http_connections_closed", "HTTP connections closed or refused by the server, by "
            "reason: head, idle and stalled (time limits), limit (closed to make room for a new one), refused (no "
            "room).", ("reason",),
            {(reason,): connections.closed[reason] for reason in ("head", "idle", "stalled", "limit", "refused")})
        yield CounterMetricFamily("epdd_descriptors_exhausted",
                                  "Checks, one every 5 seconds, that found no free file descriptor.",
                                  connections.exhausted)


def _labelled(family: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, text: str,
              labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    """One metric with a value for each combination of its labels."""
    metric = family(f"epdd_{name}", text, labels=labels)
    for combination, value in values.items():
        metric.add_metric(combination, value)
    return metric


def _simple(status: _Status) -> Iterator[Metric]:
    for family, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, text, section, key in table:
            value = (status.get(section, {}) if section else status).get(key)
            if value is not None:
                yield family(f"epdd_{name}", text, value)


def _workers(workers: list[_Status], router: _Status) -> Iterator[Metric]:
    pd = [worker for worker in workers if worker.get("role") == "pd"]
    yield GaugeMetricFamily("epdd_num_requests_waiting", "Requests waiting for KV cache in a prefill-decode worker.",
                            sum(worker.get("waiting") or 0 for worker in pd))
    capacity = sum(worker.get("kv_tokens") or 0 for worker in pd)
    used = sum(worker.get("kv_used") or 0 for worker in pd)
    yield GaugeMetricFamily("epdd_kv_cache_usage_perc", "Share of the KV cache that requests use, 0 to 1.",
                            used / capacity if capacity else 0.0)
    yield _labelled(GaugeMetricFamily, "encode_in_flight", "Work handed to encoders and not finished, in router.unit.",
                    ("pool",), {(pool,): router.get(f"i_{pool}") or 0 for pool in ("cpu", "gpu")})
    settings = {label: str(router[label]) for label in _ROUTER_LABELS if label in router}
    yield _labelled(GaugeMetricFamily, "router_info", "Always 1; labels are the router's settings in force.",
                    tuple(settings), {tuple(settings.values()): 1})
    yield _labelled(GaugeMetricFamily, "worker_state", "1 for the state that the worker is in.", ("worker", "state"),
                    {(worker["name"], str(worker["state"]).lower()): 1 for worker in workers})
    for name, text, key in _ROLE_GAUGES:
        yield _labelled(GaugeMetricFamily, name, text, ("worker",),
                        {(worker["name"],): worker[key] for worker in workers if worker.get(key) is not None})
    for family, table in ((GaugeMetricFamily, _WORKER_GAUGES), (CounterMetricFamily, _WORKER_COUNTERS)):
        for name, text, key in table:
            yield _labelled(family, name, text, ("worker",),
                            {(worker["name"],): worker.get(key) or 0 for worker in workers})
