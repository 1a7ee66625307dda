"""`/metrics`: requests and the daemon's status in Prometheus' text format.  Labels name workers, states
and settings only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epdd import log
from epdd.frontend.connections import Connections
from epdd.frontend.metrics import RequestStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Status = dict[str, Any]

# (name, help, section of the status, key)
_GAUGES = (
    ("uptime_seconds", "Since the daemon's start", None, "uptime_s"),
    ("encode_queue_jobs", "Images that wait for an encoder", "router", "queue_jobs"),
    ("encode_queue_cost", "Their cost, in the router's unit", "router", "queue_cost"),
    ("encode_queue_oldest_seconds", "How long the oldest of them has waited", "router", "oldest_s"),
    ("router_budget_cpu", "What the CPU encoders may have in flight", "router", "budget_cpu"),
    ("router_slack", "0: first come first served; more: small requests before large ones", "router", "slack"),
    ("router_ratio", "GPU encoder speed over CPU encoder speed, in force", "router", "ratio"),
    ("router_ratio_set", "The same, as the operator set it", "router", "ratio_set"),
    ("router_ratio_measured", "The same, as measured", "router", "ratio_measured"),
    ("arena_bytes", "Shared memory for embeddings", "arena", "bytes"),
    ("arena_huge_bytes", "Of it, in huge pages", "arena", "huge_bytes"),
    ("arena_used_bytes", "Of it, leased or cached", "arena", "used_bytes"),
    ("arena_pinned_bytes", "Of it, in use by requests", "arena", "pinned_bytes"),
    ("arena_leases", "Leases", "arena", "leases"),
    ("arena_waiting", "Leases waited for", "arena", "waiting"),
    ("cache_entries", "Embeddings kept for reuse", "cache", "entries"),
    ("cache_bytes", "Their bytes", "cache", "bytes"),
    ("poison_entries", "Images and prompts refused since they killed workers", "poison", "entries"),
)
_COUNTERS = (
    ("cache_hits", "Images whose embedding was there", "cache", "hits"),
    ("cache_misses", "Images that had to be encoded", "cache", "misses"),
    ("cache_joined", "Images that waited for another request's encoding", "cache", "joined"),
    ("cache_evictions", "Embeddings dropped for room", "cache", "evictions"),
    ("poison_images", "Images found to kill encoders", "poison", "images"),
    ("poison_prompts", "Prompts found to kill prefill-decode workers", "poison", "prompts"),
    ("poison_refused", "Requests refused for one of them", "poison", "refused"),
)
_WORKER_GAUGES = (
    ("worker_in_flight", "Work handed to the worker and unanswered", "in_flight"),
    ("worker_in_flight_cost", "Its cost: patches or tokens", "in_flight_cost"),
    ("worker_resident_bytes", "Resident memory", "rss_bytes"),
)
_ROLE_GAUGES = (
    ("worker_share", "Part of the patches encoded in about the last minute, 0 to 1", "share"),
    ("worker_slowness", "Seconds an image takes over what its time model from the start says", "slowness"),
    ("worker_kv_cached", "Tokens in KV memory that nobody uses, kept for prompts to come", "kv_cached"),
)
_ROUTER_LABELS = ("policy", "unit")
_WORKER_COUNTERS = (
    ("worker_done", "Work finished", "done"),
    ("worker_failed", "Work failed", "failed"),
    ("worker_restarts", "Restarts", "restarts"),
)


class Exposition:
    """The metrics of one daemon."""

    def __init__(self, stats: RequestStats, connections: Connections, status: Callable[[], _Status]) -> None:
        self._stats = stats
        self._status = _StatusCollector(stats, connections, status)

    def text(self) -> bytes:
        return generate_latest(self._stats.registry) + generate_latest(self._status)


class _StatusCollector(Collector):
    """Reads everything at the moment of the scrape, so that no gauge can lag behind."""

    def __init__(self, stats: RequestStats, connections: Connections, status: Callable[[], _Status]) -> None:
        self._stats = stats
        self._connections = connections
        self._read = status

    def collect(self) -> Iterator[Metric]:
        status = self._read()
        yield from self._requests()
        yield from _simple(status)
        if emulated := status.get("emulated"):
            label = GaugeMetricFamily("epdd_emulated", "1: emulated devices", labels=["profile", "answers", "scale"])
            label.add_metric([emulated["profile"], emulated["answers"], f"{emulated['scale']:g}"], 1)
            yield label
        yield from _workers(status.get("workers", []), status.get("router", {}))

    def _requests(self) -> Iterator[Metric]:
        stats = self._stats
        yield GaugeMetricFamily("epdd_num_requests_running", "Requests in the house", stats.running)
        outcomes = CounterMetricFamily("epdd_requests", "Requests by how they ended", labels=["outcome"])
        for outcome in ("completed", "failed", "rejected", "aborted"):
            outcomes.add_metric([outcome], stats.counts[outcome])
        yield outcomes
        responses = CounterMetricFamily("epdd_http_responses", "HTTP answers", labels=["status"])
        for status, count in sorted(stats.statuses.items()):
            responses.add_metric([str(status)], count)
        yield responses
        errors = CounterMetricFamily("epdd_errors", "Errors answered, by their code", labels=["code"])
        for code, count in sorted(stats.errors.items()):
            errors.add_metric([code], count)
        yield errors
        yield CounterMetricFamily("epdd_log_dropped", "Log lines that nobody took from stderr in time",
                                  log.output().dropped)
        if stats.request_log is not None:
            yield CounterMetricFamily("epdd_request_log_lines", "Written to the request log",
                                      stats.request_log.written)
            yield CounterMetricFamily("epdd_request_log_dropped", "Lines that the disk did not take",
                                      stats.request_log.dropped)
        connections = self._connections
        yield GaugeMetricFamily("epdd_http_connections", "Open HTTP connections", len(connections))
        closed = CounterMetricFamily(
            "epdd_http_connections_closed", "HTTP connections that the server closed or refused: head, idle, stalled "
            "(out of time), limit (closed for a new one), refused (no room)", labels=["reason"])
        for reason in ("head", "idle", "stalled", "limit", "refused"):
            closed.add_metric([reason], connections.closed[reason])
        yield closed
        yield CounterMetricFamily("epdd_descriptors_exhausted",
                                  "Looks, one in 5 s, that found no file descriptor free",
                                  connections.exhausted)
        held = GaugeMetricFamily("epdd_held_bytes", "Request bodies and image files in memory", labels=["what"])
        for what, read in stats.gauges.items():
            held.add_metric([what], read())
        yield held
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts, images included", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.generated_tokens),
            ("images", "Images of requests", stats.images),
            ("ignored_fields", "Fields of requests that had no effect, unknown ones among them", stats.ignored_fields),
        ):
            yield CounterMetricFamily(f"epdd_{name}", text, value)


def _simple(status: _Status) -> Iterator[Metric]:
    for family, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, text, section, key in table:
            value = (status.get(section, {}) if section else status).get(key)
            if value is not None:
                yield family(f"epdd_{name}", text, value)


def _workers(workers: list[_Status], router: _Status) -> Iterator[Metric]:
    pd = [worker for worker in workers if worker.get("role") == "pd"]
    yield GaugeMetricFamily("epdd_num_requests_waiting", "Answers that wait for room in a PD worker",
                            sum(worker.get("waiting") or 0 for worker in pd))
    capacity = sum(worker.get("kv_tokens") or 0 for worker in pd)
    used = sum(worker.get("kv_used") or 0 for worker in pd)
    yield GaugeMetricFamily("epdd_kv_cache_usage_perc", "Used share of the KV cache, 0 to 1",
                            used / capacity if capacity else 0.0)
    in_flight = GaugeMetricFamily("epdd_encode_in_flight", "Encoding or handed over, in the router's unit",
                                  labels=["pool"])
    for pool in ("cpu", "gpu"):
        in_flight.add_metric([pool], router.get(f"i_{pool}") or 0)
    yield in_flight
    settings = {label: str(router[label]) for label in _ROUTER_LABELS if label in router}
    info = GaugeMetricFamily("epdd_router_info", "1, with the router's settings as labels", labels=list(settings))
    info.add_metric(list(settings.values()), 1)
    yield info
    states = GaugeMetricFamily("epdd_worker_state", "1 for the state the worker is in", labels=["worker", "state"])
    for worker in workers:
        states.add_metric([worker["name"], str(worker["state"]).lower()], 1)
    yield states
    for name, text, key in _ROLE_GAUGES:
        gauge = GaugeMetricFamily(f"epdd_{name}", text, labels=["worker"])
        for worker in workers:
            if worker.get(key) is not None:
                gauge.add_metric([worker["name"]], worker[key])
        yield gauge
    for family, table in ((GaugeMetricFamily, _WORKER_GAUGES), (CounterMetricFamily, _WORKER_COUNTERS)):
        for name, text, key in table:
            metric = family(f"epdd_{name}", text, labels=["worker"])
            for worker in workers:
                metric.add_metric([worker["name"]], worker.get(key) or 0)
            yield metric
