"""The daemon's status, which epdctl, /health and /metrics show.  It changes nothing."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from msgspec import structs

from epdd import __version__
from epdd.dispatch.admission import Admission
from epdd.dispatch.encoder_cache.cache import EncoderCache
from epdd.dispatch.encoding import Encoding
from epdd.dispatch.routing.replicas import CPU, GPU
from epdd.families import ModelInfo
from epdd.fleet.placement_watcher import PlacementWatcher
from epdd.fleet.process import resident_bytes
from epdd.fleet.supervisor import Supervisor
from epdd.fleet.worker import State, Worker
from epdd.hardware import binding
from epdd.hardware.topology import ranges
from epdd.ops.metrics import RequestStats
from epdd.settings.config import Config


@dataclass(frozen=True)
class States:
    """The states that probes get."""

    state: str                              # of the daemon: starting, ready, degraded, draining or failed
    workers: tuple[tuple[str, str, str], ...]   # name, role and state in lower case of each worker


class Status:
    """Collects the numbers from the parts of the daemon that own them."""

    def __init__(self, config: Config, family: ModelInfo, model_name: str, supervisor: Supervisor,
                 placement_watcher: PlacementWatcher,
                 cache: EncoderCache, encoding: Encoding, admission: Admission, stats: RequestStats,
                 emulated: dict[str, Any] | None = None) -> None:
        self._config = config
        self._family = family
        self._model_name = model_name
        self._supervisor = supervisor
        self._placement_watcher = placement_watcher
        self._encoder_cache = cache
        self._encoding = encoding
        self._admission = admission
        self._stats = stats
        self._emulated = emulated
        self._started = time.monotonic()
        self._key: tuple[Any, ...] = ()         # of the states that `_states` was made from
        self._states = States("starting", ())
        self.port = config.server.port      # as configured until the listener is open, then the real one

    def state(self) -> tuple[str, list[str]]:
        """"starting", "ready", "degraded", "draining" or "failed", and why it is not "ready"."""
        workers = self._supervisor.workers
        why = [_why(worker) for worker in workers if worker.state is not State.READY]
        if self._placement_watcher.error:
            why.append(f"workers stay where they were placed: {self._placement_watcher.error}")
        if self._admission.draining:
            return "draining", why
        roles = [self._supervisor.role(role) for role in ("encoder", "pd")]
        # Without encoders, text is still served.  An encoder that was ready once may be resumed by an operator.
        lost = [role for role in roles if all(worker.state is State.FAILED for worker in role)]
        if any(role is roles[1] or not any(worker.was_ready for worker in role) for role in lost):
            return "failed", why
        if all(any(worker.takes_work for worker in role) for role in roles):
            return ("ready", why) if not why else ("degraded", why)
        return ("degraded" if all(any(worker.was_ready for worker in role) for role in roles) else "starting"), why

    def states(self) -> States:
        """For probes, which anybody may send at any rate: reads nothing from the system, and builds nothing twice."""
        key = (self._admission.draining, bool(self._placement_watcher.error),
               *((worker, worker.state, worker.was_ready) for worker in self._supervisor.workers))
        if key != self._key:
            self._key = key
            self._states = States(self.state()[0], tuple(
                (worker.name, worker.role, worker.state.value.lower()) for worker in self._supervisor.workers))
        return self._states

    def line(self, state: str, why: list[str]) -> str:
        """One line for systemd's status: how many workers serve, what runs, what is wrong."""
        parts = []
        for role, noun in (("encoder", "encoders"), ("pd", "PD")):
            workers = self._supervisor.role(role)
            parts.append(f"{sum(worker.takes_work for worker in workers)}/{len(workers)} {noun}")
        text = f"{state}: {', '.join(parts)}; {self._admission.in_flight} requests running"
        return f"{text}; {why[0]}" if why else text

    def snapshot(self) -> dict[str, Any]:
        """Everything `epdctl status --json` prints."""
        state, why = self.state()
        return {
            "version": __version__, "pid": os.getpid(), "state": state, "why": why,
            "uptime_s": time.monotonic() - self._started, "rss_bytes": resident_bytes(os.getpid()),
            "model": {"name": self._model_name, "path": self._family.folder, "type": self._family.model_type,
                      "context_max": self._admission.max_model_len()},
            "emulated": self._emulated,     # null: the devices are real
            "listen": {"host": self._config.server.host, "port": self.port},
            "workers": [self._worker(worker) for worker in self._supervisor.workers],
            "placement": {"changes": self._placement_watcher.changes, "error": self._placement_watcher.error},
            "router": self.router(), "arena": self._arena(), "cache": self._cache(),
            "transport": {"pairs": self._encoding.transport.pairs(), "pools": self._encoding.transport.pools()},
            "poison": asdict(self._encoding.crashes.counts) | {"entries": self._encoding.crashes.entries},
            "requests": self._stats.snapshot() | {"running": self._admission.in_flight},
        }

    def _worker(self, worker: Worker) -> dict[str, Any]:
        ready = worker.ready
        replica = self._encoding.router.replicas.by_name.get(worker.name)
        held = replica.held if replica else []
        pid = worker.process.pid if worker.process and ready else None
        # As the kernel has it now: the binding may have changed since the worker started.
        cpus = sorted(set().union(*binding.threads(pid).values())) if pid else []
        policy, nodes = binding.policy(binding.folder(pid)) if pid else ("", set())
        return {
            "name": worker.name, "role": worker.role, "device": worker.spec.device, "state": worker.state.value,
            "pid": worker.process.pid if worker.process else None,
            "cpus": cpus or None, "numa_node": worker.spec.numa_node,
            "mem_nodes": list(binding.memory_nodes(binding.folder(pid))) if pid else None,
            "mem_policy": f"{policy}:{ranges(nodes)}" if nodes else policy or None,
            "threads": ready.binding.threads if ready else worker.spec.threads,
            "warning": "; ".join(filter(None, (ready.binding.warning, ready.warning))) if ready else "",
            "stage": worker.loading.stage if worker.state is State.STARTING else None,
            "progress": worker.loading.done if worker.state is State.STARTING else None,
            "restarts": worker.restarts, "in_flight": worker.in_flight, "in_flight_cost": worker.in_flight_cost,
            "done": worker.done, "failed": worker.failed, "rate_per_s": worker.rate.value(),
            **self._pace(worker),
            "oldest_s": time.monotonic() - held[0].started if held else None,
            "rss_bytes": resident_bytes(worker.process.pid) if worker.process else None,
            "dtype": ready.dtype if ready else None, "abilities": list(ready.abilities) if ready else None,
            "parameters": ready.parameters if ready else None,
            "backend": (ready.backend or None) if ready else None,
            "trials": [msgspec.to_builtins(trial) for trial in ready.trials] if ready else None,
            "kv_used": worker.heartbeat.kv_used if worker.role == "pd" else None,
            "kv_cached": worker.heartbeat.kv_cached if worker.role == "pd" else None,
            "kv_tokens": ready.kv_tokens if ready and worker.role == "pd" else None,
            "running": worker.heartbeat.running, "waiting": worker.heartbeat.waiting,
            "preempted": worker.heartbeat.preempted,
            "last_error": worker.last_error,
        }

    def _pace(self, worker: Worker) -> dict[str, Any]:
        if worker.role != "encoder":
            return {"share": None, "slowness": None, "slow": False}
        encoding = self._encoding
        return {"share": encoding.share(worker), "slowness": encoding.model(worker).correction,
                "slow": encoding.slow(worker)}

    def router(self) -> dict[str, Any]:
        """The router's settings in force, and the numbers that it decides with."""
        router = self._encoding.router
        replicas, source = router.replicas, self._encoding.ratio_source
        budget = router.budget(router.waiting)
        return structs.asdict(self._encoding.settings) | {
            "ratio": router.ratio() if source != "none" else None, "ratio_source": source,
            "ratio_set": router.ratio_set or None, "ratio_measured": router.ratio_measured(),
            "i_cpu": replicas.in_flight[CPU], "i_gpu": replicas.in_flight[GPU],
            "n_cpu": replicas.count[CPU], "n_gpu": replicas.count[GPU],
            # Without GPUs the budget is unbounded, which JSON cannot say.
            "budget_cpu": None if budget == float("inf") else budget,
            "queue_jobs": len(router.queue), "queue_cost": router.waiting,
            "oldest_s": max((time.monotonic() - job.queued for job in router.queue), default=0.0),
        }

    def _arena(self) -> dict[str, Any]:
        used, cached = self._encoder_cache.host.used_bytes, self._encoder_cache.host.cached_bytes
        encoders = [worker.ready for worker in self._supervisor.role("encoder") if worker.ready]
        return {"bytes": self._encoder_cache.size, "huge_bytes": sum(ready.arena_huge_bytes for ready in encoders),
                "used_bytes": used, "cached_bytes": cached, "pinned_bytes": used - cached,
                "leases": self._encoder_cache.entries, "waiting": self._encoder_cache.waiting}

    def _cache(self) -> dict[str, Any]:
        counts = self._encoder_cache.counts
        return {"entries": self._encoder_cache.evictable_entries, "bytes": self._encoder_cache.host.cached_bytes,
                "limit_bytes": self._encoder_cache.cache_limit, "hits": counts.hits, "misses": counts.misses,
                "joined": counts.joined, "evictions": counts.evictions}


def _why(worker: Worker) -> str:
    """Why a worker is not READY; one that an operator drained has no current error."""
    error = worker.fault or ("" if worker.state is State.DRAINING else worker.last_error)
    return f"{worker.name} {worker.state.value}{': ' if error else ''}{error}"
