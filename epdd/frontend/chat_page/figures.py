"""`GET /status`: the public part of the daemon's status, without paths, processes and reasons."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

_AGE_MAX_S = 1.0        # a snapshot reads /proc for every worker: one a second is made for all pages
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

# Listed one by one, so that a new field of the snapshot is not public by accident.
_TOP = ("version", "state", "uptime_s")
_SECTIONS = {
    "model": ("name", "type", "context_max"),
    "emulated": ("profile", "about", "answers", "scale"),
    "router": ("policy", "unit", "ratio", "ratio_source", "i_cpu", "i_gpu", "n_cpu", "n_gpu", "budget_cpu",
               "queue_jobs", "queue_cost", "oldest_s"),
    "arena": ("bytes", "huge_bytes", "used_bytes", "cached_bytes", "pinned_bytes", "leases", "waiting"),
    "cache": ("entries", "bytes", "limit_bytes", "hits", "misses", "joined", "evictions"),
    "requests": ("running", "accepted", "completed", "failed", "rejected", "aborted", "latency_s", "ttft_s",
                 "tokens_per_s", "images_per_s"),
}
_WORKER = ("name", "role", "device", "numa_node", "state", "stage", "progress", "restarts", "in_flight",
           "in_flight_cost", "done", "failed", "rate_per_s", "share", "slow", "slowness", "oldest_s", "kv_used",
           "kv_tokens", "running", "waiting")


class Figures:
    """The endpoint."""

    def __init__(self, snapshot: Callable[[], dict[str, Any]], clock: Callable[[], float] = time.monotonic) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._taken: float | None = None
        self._body = b""

    async def get(self, request: web.Request) -> web.Response:
        now = self._clock()
        if self._taken is None or now - self._taken >= _AGE_MAX_S:
            self._taken, self._body = now, orjson.dumps(shown(self._snapshot()))
        return web.Response(body=self._body, headers=_HEADERS, content_type="application/json")


def shown(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The public part of a snapshot."""
    return {
        **_only(_TOP, snapshot),
        **{name: _only(keys, snapshot[name]) for name, keys in _SECTIONS.items() if snapshot.get(name)},
        "workers": [_only(_WORKER, worker) for worker in snapshot["workers"]],
    }


def _only(keys: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    return {key: values[key] for key in keys if key in values}
