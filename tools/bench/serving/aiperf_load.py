"""Load by aiperf, a load generator that others keep well: it comes from PyPI and lives in a venv of its own.

    python -m venv A && A/bin/pip install aiperf

Requests are chat completions about new random pictures (noise, so that nothing is cached or encoded once for several),
streamed, greedy, with answers of exactly `osl` tokens where the model never ends by itself.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What is kept of aiperf's summary, by our names; times in milliseconds.
METRICS = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "gap": "inter_chunk_latency",
           "latency": "request_latency", "osl": "output_sequence_length", "tokens_per_s": "output_token_throughput",
           "requests_per_s": "request_throughput"}
STATISTICS = ("avg", "p50", "p90", "p99", "max")
LOG_LETTERS = 3000


@dataclass(frozen=True)
class Load:
    """What each request is: so many pictures of a size, tokens of text in, tokens out."""

    images: int
    width: int
    height: int
    isl: int
    osl: int
    format: str = "jpeg"


@dataclass(frozen=True)
class Arrivals:
    """Poisson arrivals at a rate a second, or with a rate of 0 always so many requests at once."""

    requests: int
    rate: float = 0.0
    at_once: int = 0

    def __str__(self) -> str:
        return f"{self.rate:g}" if self.rate else f"{self.at_once} at once"


class AiperfFailed(Exception):
    """It measured nothing; the message has its last words."""


def run(aiperf: str, url: str, model: str, tokenizer: Path, load: Load, arrivals: Arrivals, seed: int, folder: Path,
        extra: dict[str, Any]) -> dict[str, Any]:
    """One measurement as a dict; aiperf's own files stay in the folder.  `extra`: more fields of each request's body.

    Raises AiperfFailed.
    """
    pace = (["--request-rate", arrivals.rate, "--arrival-pattern", "poisson"] if arrivals.rate
            else ["--concurrency", arrivals.at_once])
    command = [
        aiperf, "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", tokenizer, *pace, "--request-count", arrivals.requests,
        "--num-dataset-entries", arrivals.requests, "--isl", load.isl, "--osl", load.osl,
        "--image-batch-size", load.images, "--image-width-mean", load.width, "--image-height-mean", load.height,
        "--image-format", load.format, "--extra-inputs", json.dumps({"temperature": 0} | extra),
        "--random-seed", seed, "--output-artifact-dir", folder, "--ui", "none", "--no-server-metrics",
        "--no-gpu-telemetry", "--record-processors", 1,
        # Texts of several tokens can be one token when they are read back.
        "--use-server-token-count"]
    # Offline, aiperf takes a tokenizer's folder for a name in the hub's cache.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    folder.mkdir(parents=True, exist_ok=True)
    before, began = _cpu_s(), time.monotonic()
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment,
                           stdin=subprocess.DEVNULL)
    cpu_s, wall_s = _cpu_s() - before, time.monotonic() - began
    summaries = list(folder.rglob("profile_export_aiperf.json"))
    if not summaries:
        raise AiperfFailed(f"aiperf ended with {ended.returncode}:\n{ended.stdout[-LOG_LETTERS:]}\n"
                           f"{ended.stderr[-LOG_LETTERS:]}")
    summary = json.loads(summaries[0].read_text())
    found = {ours: {name: (summary.get(theirs) or {}).get(name) for name in STATISTICS}
             for ours, theirs in METRICS.items()}
    return {"rate": arrivals.rate, "at_once": arrivals.at_once,
            "done": (summary.get("request_count") or {}).get("avg", 0),
            "errors": (summary.get("error_request_count") or {}).get("avg", 0),
            "seconds": (summary.get("benchmark_duration") or {}).get("avg"),
            "client_cpu_s": round(cpu_s, 2), "client_wall_s": round(wall_s, 2), **found}


def _cpu_s() -> float:
    """Of all children that have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
