"""Memory of the daemon's processes at start and over many requests, beside what they should need.

    python -m tools.bench.serving.memory --shape 500m --dtype bfloat16 --requests 2000 --out DIR

Starts the real daemon on a checkpoint with random weights (or `--model FOLDER`) and sends short requests, every tenth
with a picture of another size.  After each twentieth of them it waits until nothing runs and reads each process's
memory.

PSS is a process's private memory plus its share of shared memory, so the sum over all processes counts every page once,
mapped files and the arena too.  PRIVATE would be free if the process ended.  ANON is memory without a file, shared with
the fork server or not: it grows only by what a process allocates.  PRIVATE also grows when a process first writes to a
page from its parent.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools import launch
import psutil

from tools import random_model
from tools.bench.plots import Panel
from tools.bench.report import Report
from tools.bench.workers.prefix import pictures

from epdd.worker.language.kv_cache import bytes_per_token

CODE_BYTES = 400e6          # of Python, torch and the model code
WEIGHTS_FACTOR = 1.15
CLIENTS = 4
WARM = 0.1                  # share of the requests after which growth counts
POINTS = 20
SIDES = tuple(range(32, 225, 32))
WORDS = "red green blue round flat near far left right one two many the of and with above below what where how".split()
REST_S = 600.0
FIELDS = {"PSS": ("Pss",), "ANON": ("Anonymous",), "PRIVATE": ("Private_Clean", "Private_Dirty")}


def memory(pid):
    """Bytes by the names of FIELDS, and the peak of resident memory."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file if line.endswith("kB\n")}
    with open(f"/proc/{pid}/status") as file:
        peak = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    return {name: sum(found[field] for field in fields) for name, fields in FIELDS.items()} | {"PEAK": peak}


def processes(daemon, status):
    """Pids by name."""
    workers = {worker["name"]: worker["pid"] for worker in status["workers"]}
    server = next(one.pid for one in psutil.Process(daemon.pid).children() if "forkserver" in " ".join(one.cmdline()))
    return {"daemon": daemon.pid, "fork server": server} | workers


def at_rest(daemon):
    daemon.until(lambda: (status := daemon.status())["state"] == "ready" and not status["requests"]["running"], REST_S)
    return {name: memory(pid) for name, pid in processes(daemon, daemon.status()).items()}


def ask(url, number):
    """One unique request, so that caches have only what all prompts share."""
    rng = random.Random(number)
    parts = pictures(1, rng.choice(SIDES), number) if number % 10 == 0 else []
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))
    body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
            "max_tokens": rng.randint(1, 6), "temperature": 0}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REST_S) as answer:
        answer.read()


def measure(daemon, requests):
    """[(requests answered, memory by process)]: at the start, then at POINTS."""
    points = [(0, at_rest(daemon))]
    with ThreadPoolExecutor(CLIENTS) as pool:
        for point in range(1, POINTS + 1):
            until = requests * point // POINTS
            list(pool.map(lambda number: ask(daemon.chat_url, number), range(points[-1][0], until)))
            points.append((until, at_rest(daemon)))
    return points


def needed(status, folder):
    """Bytes that the settings reserve, by name, and of the weights in the type of computation."""
    from transformers import AutoConfig

    import torch
    workers = status["workers"]
    weights = sum(worker["parameters"] * getattr(torch, worker["dtype"]).itemsize
                  for worker in {worker["role"]: worker for worker in workers}.values())
    config = AutoConfig.from_pretrained(folder).get_text_config()
    kv = sum(worker["kv_tokens"] * bytes_per_token(config, getattr(torch, worker["dtype"]))
             for worker in workers if worker["role"] == "pd")
    return {"weights": weights, "KV cache": kv, "arena": status["arena"]["bytes"], "code": CODE_BYTES}


def growth(points):
    """By process, how much its memory without a file grew from the first tenth of the requests to the end, in per cent.

    The end is the median of the last five readings: a single one may include memory that is about to be freed.
    """
    warm = next(sizes for count, sizes in points if count >= WARM * points[-1][0])
    return {name: 100 * (statistics.median(sizes[name]["ANON"] for _, sizes in points[-5:]) / warm[name]["ANON"] - 1)
            for name in warm}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder (default: one is made, of --shape)")
    parser.add_argument("--shape", default="500m", choices=random_model.SHAPES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = Report(args.out)
    with tempfile.TemporaryDirectory(prefix="epdd-memory-") as made:
        folder = args.model or str(random_model.build(Path(made), random_model.SHAPES[args.shape], args.dtype))
        settings = ["pd.kv_tokens=16384", "arena.bytes=0x10000000", *args.set]
        with launch.Daemon("--model", folder, settings=settings) as daemon:
            daemon.ready()
            began = time.monotonic()
            points = measure(daemon, args.requests)
            seconds = time.monotonic() - began
            tell(report, needed(daemon.status(), folder), points, seconds)
    report.close(points=points)


def tell(report, need, points, seconds):
    grown = growth(points)
    rows = []
    for name, first in points[0][1].items():
        last = points[-1][1][name]
        rows.append([name, *(f"{sizes[field] / 1e6:.0f}" for field in FIELDS for sizes in (first, last)),
                     f"{last['PEAK'] / 1e6:.0f}", f"{grown[name]:+.1f} %"])
    header = ["process", *(f"{field} {when}" for field in FIELDS for when in ("at start", "at the end")), "peak RSS",
              "ANON grew"]
    report.table(f"MB over {points[-1][0]} requests in {seconds:.0f} s; growth from the first tenth on", header, rows)
    factors = {name: WEIGHTS_FACTOR if name == "weights" else 1.0 for name in need}
    budget = sum(factors[name] * size for name, size in need.items())
    report.table("Budget, MB", ["what", "bytes", "factor", "allowed"],
                 [[name, f"{size / 1e6:.0f}", factors[name], f"{factors[name] * size / 1e6:.0f}"]
                  for name, size in need.items()])
    for when, (_, sizes) in (("at start", points[0]), ("at the end", points[-1])):
        workers = sum(size["PSS"] for name, size in sizes.items() if "/" in name)
        whole = sum(size["PSS"] for size in sizes.values())
        report.say(f"{when}: workers {workers / 1e6:.0f} MB, {workers / budget:.2f} of {budget / 1e6:.0f}; with fork "
                   f"server and daemon {whole / 1e6:.0f} MB, {whole / budget:.2f}")
    report.plot("memory", "Memory without files behind it", "requests answered", [
        Panel("", "MB", {name: [(count, sizes[name]["ANON"] / 1e6) for count, sizes in points]
                         for name in points[0][1]})])


if __name__ == "__main__":
    main()
