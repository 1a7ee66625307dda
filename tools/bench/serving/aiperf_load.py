"""Load by aiperf, NVIDIA's load generator, from PyPI in a venv of its own.

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

# Our names of values in aiperf's summary; times in milliseconds.
METRICS = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "gap": "inter_chunk_latency",
           "latency": "request_latency", "osl": "output_sequence_length", "tokens_per_s": "output_token_throughput",
           "requests_per_s": "request_throughput"}
STATISTICS = ("avg", "p50", "p90", "p99", "max")
LOG_LETTERS = 3000


@dataclass(frozen=True)
class Load:
    """Each request's pictures and their size, and its tokens of text in and out."""

    images: int
    width: int
    height: int
    isl: int
    osl: int
    format: str = "jpeg"


@dataclass(frozen=True)
class Arrivals:
    """Poisson arrivals at a rate a second; with a rate of 0 a constant number of requests in flight."""

    requests: int
    rate: float = 0.0
    at_once: int = 0

    def __str__(self) -> str:
        return f"{self.rate:g}" if self.rate else f"{self.at_once} at once"


class AiperfFailed(Exception):
    """aiperf measured nothing; the message has the end of its output."""


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
        # A text of several tokens can become one token when tokenised again.
        "--use-server-token-count"]
    # Offline, aiperf treats a tokenizer's folder as a name in the hub's cache.
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
    """CPU seconds of all descendants that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
