"""The real daemon with an encoder and a prefill-decode worker on one GPU and encoders on the CPUs beside them."""

from __future__ import annotations

import base64
import http.client
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tools import launch
from tools.gpu_check.parts import Check, jpeg

IMAGES, ROUNDS, HANDOVERS = 8, 3, 1000
QUESTION = "What do these pictures show?"


def measure(check: Check) -> None:
    workers = ("encoder.workers=cpu:1", "pd.workers=cpu:1") if check.cpu else (
        "encoder.workers=gpu:1,cpu:1", "pd.workers=gpu:1", "pd.max_batched_tokens=2048", f"arena.bytes={4 << 30}")
    with launch.Daemon("--model", str(check.checkpoint), settings=workers) as daemon:
        check.row("start", daemon.ready(), "s", "from nothing to ready")
        everybody(daemon)
        for worker in daemon.status()["workers"]:
            check.row(worker["name"], worker["device"], "", f"{worker['dtype']}, {worker['rss_bytes'] / 1e9:.1f} GB")
        size, small = ((640, 360), (64, 64)) if check.cpu else ((1920, 1080), (224, 224))
        seconds = [ask(daemon, content(size, IMAGES, seed), 1 if check.cpu else 32) for seed in range(ROUNDS + 1)][1:]
        first, token = (statistics.median(each) for each in zip(*seconds))
        check.row("TTFT", first, "s", f"{IMAGES} new pictures of {size[0]} x {size[1]}, one request at a time")
        check.row("a token", 1e3 * token, "ms", "between the first and the last of an answer")
        router = daemon.status()["router"]
        check.row("R", router["ratio"] or "none", "", f"by the daemon, {router['ratio_source']}")
        if not check.cpu:
            daemon.ask("policy", policy="gpu-only")
            alone = statistics.median(ask(daemon, content(size, IMAGES, 100 + seed), 2)[0] for seed in range(ROUNDS))
            check.row("TTFT, GPU alone", alone, "s", "the same without the CPUs' encoders")
            daemon.ask("policy", policy="earliest")
        leaks(check, daemon, small)


def everybody(daemon: launch.Daemon) -> None:
    """Wait until all workers are ready."""
    daemon.until(lambda: all(worker["state"] == "READY" for worker in daemon.status()["workers"]))


def content(size: tuple[int, int], images: int, seed: int) -> list[dict[str, Any]]:
    files = (jpeg(*size, 1000 * seed + i) for i in range(images))
    urls = (f"data:image/jpeg;base64,{base64.b64encode(file).decode()}" for file in files)
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": QUESTION}]


def ask(daemon: launch.Daemon, parts: list[dict[str, Any]], tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and between tokens."""
    body = json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": tokens, "temperature": 0,
                       "ignore_eos": True, "stream": True})
    host = daemon.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=300)
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()       # its head is sent with the first token
    first = time.perf_counter() - began
    text = answer.read().decode()
    connection.close()
    if answer.status != 200 or '"error"' in text:
        raise SystemExit(f"answered {answer.status}: {text[-300:]}")
    return first, (time.perf_counter() - began - first) / max(1, tokens - 1)


def leaks(check: Check, daemon: launch.Daemon, size: tuple[int, int]) -> None:
    """Memory and leases that a thousand pictures leave behind, after a hundred for warm-up."""
    handovers = HANDOVERS if not check.cpu else 80
    many(daemon, size, handovers // 10, 10_000)
    before = memory(check, daemon)
    began = time.perf_counter()
    many(daemon, size, handovers, 20_000)
    seconds = time.perf_counter() - began
    after = memory(check, daemon)
    gpu, host = (b - a for a, b in zip(before, after))
    held = daemon.status()["arena"]["pinned_bytes"]
    check.row(f"{handovers} pictures served", handovers / seconds, "images/s",
              f"then {held} bytes leased, {gpu / 2 ** 20:.0f} MiB more on the GPU, {host / 2 ** 20:.0f} in the workers")


def many(daemon: launch.Daemon, size: tuple[int, int], pictures: int, seed: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: ask(daemon, content(size, IMAGES, seed + i), 4), range(-(-pictures // IMAGES))))


def memory(check: Check, daemon: launch.Daemon) -> tuple[int, int]:
    """Bytes in use on the GPU, and resident in the workers."""
    resident = sum(worker["rss_bytes"] or 0 for worker in daemon.status()["workers"])
    if check.cpu:
        return 0, resident
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used), resident
