"""A daemon's status, for tests of its display."""

from __future__ import annotations

from typing import Any


def worker(name: str, **values: Any) -> dict[str, Any]:
    """A READY worker of the role in its name."""
    role = name.split("/")[0]
    made: dict[str, Any] = {
        "name": name, "role": role, "device": "cpu", "state": "READY", "pid": 4711, "cpus": [1, 2, 3],
        "numa_node": 0, "mem_nodes": [0], "threads": 3, "warning": "", "stage": None, "progress": None, "restarts": 0,
        "in_flight": 0, "in_flight_cost": 0, "done": 0, "failed": 0, "rate_per_s": None, "rss_bytes": 900 << 20,
        "dtype": "float32", "share": None, "slowness": None, "slow": False, "kv_used": None, "kv_tokens": None,
        "kv_cached": None, "running": 0, "waiting": 0, "last_error": ""}
    return made | values


def snapshot(**values: Any) -> dict[str, Any]:
    """Five GPUs and four CPU encoders, one of which still loads and one of which is not bound and slow."""
    made: dict[str, Any] = {
        "version": "0.1.0", "pid": 4242, "state": "degraded", "why": ["encoder/3 STARTING"], "uptime_s": 18_732.4,
        "model": {"name": "Qwen3-VL-8B", "path": "/models/Qwen3-VL-8B", "type": "qwen3_vl", "context_max": 32768},
        "listen": {"host": "0.0.0.0", "port": 8765},
        "workers": [
            worker("encoder/0", device="cuda:0", cpus=[1, 2], in_flight=3, in_flight_cost=12288, done=81234,
                   rate_per_s=31.4, rss_bytes=3 << 30, share=0.672, slowness=0.98),
            worker("encoder/1", cpus=list(range(4, 16)), in_flight=1, in_flight_cost=4096, done=12034,
                   rate_per_s=5.21, share=0.112, slowness=1.04),
            worker("encoder/2", cpus=[17, 19, 21, 23, 25, 27, 29], numa_node=1, mem_nodes=[], restarts=2, done=9012,
                   rate_per_s=4.8, share=0.1, slowness=3.12, slow=True, warning="memory not bound to NUMA node 1: "
                   "Operation not permitted; set_mempolicy may need CAP_SYS_NICE"),
            worker("encoder/3", cpus=None, numa_node=2, mem_nodes=None, state="STARTING", stage="weights",
                   progress=0.42, rss_bytes=300 << 20, dtype=None),
            worker("encoder/4", cpus=list(range(49, 64)), numa_node=3, in_flight=1, in_flight_cost=2040, done=11876,
                   rate_per_s=5.3, share=0.116, slowness=2.2),
            *(worker(f"pd/{i}", device=f"cuda:{i + 1}", cpus=[16 * i], numa_node=i, in_flight=8 + i, done=30_000,
                     in_flight_cost=8512, rate_per_s=812.5, kv_used=20_000 * (i + 1), kv_tokens=90_000,
                     kv_cached=4_000, running=8, waiting=i, rss_bytes=5 << 30, dtype="bfloat16") for i in range(4)),
        ],
        "router": {"policy": "budget", "unit": "patch", "slack": 1.0, "ratio": 6.213, "ratio_source": "measured",
                   "ratio_set": None, "ratio_measured": 6.213, "i_cpu": 6136, "i_gpu": 12288, "n_cpu": 4, "n_gpu": 1,
                   "budget_cpu": 7911.2, "queue_jobs": 3, "queue_cost": 6120, "oldest_s": 1.24},
        "arena": {"bytes": 4 << 30, "huge_bytes": 3 << 30, "used_bytes": 3 << 30, "pinned_bytes": 700 << 20,
                  "cached_bytes": 2372 << 20, "leases": 211, "waiting": 0},
        "transport": {"pools": [{"encoder": "encoder/0", "device": "cuda:0", "bytes": 4 << 30, "used_bytes": 1 << 30,
                                 "cached_bytes": 512 << 20}],
                      "pairs": [{"encoder": encoder, "pd": f"pd/{i}", "way": way, "why": why, "pinned": False}
                                for encoder, way, why in (("encoder/0", "gpu", None), ("encoder/1", "host", "on CPUs"))
                                for i in range(4)]},
        "cache": {"entries": 184, "bytes": 2372 << 20, "limit_bytes": 4 << 30, "hits": 51_233, "misses": 114_156,
                  "joined": 312, "evictions": 113_000},
        "requests": {"running": 38, "accepted": 120_345, "completed": 120_001, "failed": 3, "rejected": 212,
                     "aborted": 91, "latency_s": {"p50": 2.31, "p90": 5.02, "p99": 11.3, "count": 1000},
                     "ttft_s": {"p50": 0.412, "p90": 0.95, "p99": 2.1, "count": 1000},
                     "tokens_per_s": 3250.4, "images_per_s": 46.7},
    }
    return made | values
