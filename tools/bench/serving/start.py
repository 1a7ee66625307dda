"""Wall time of a start, and of the restart of a killed worker, with the real daemon.

    python -m tools.bench.serving.start --kills 5
    python -m tools.bench.serving.start --shape 500m --cold

Prints seconds from the command to the first answer of /health and to READY, when each worker was in which stage and
with what progress, then for each worker the seconds from kill -9 to READY again (median and worst of the kills), and
the daemon's resident memory.  `--cold` first drops the checkpoint's file from the page cache, and prints how long
reading it takes.
"""

import argparse
import os
import signal
import statistics
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from tools import launch, random_model
from tools.bench.report import Report

STAGES = ("queued", "import", "arena", "weights", "warm-up")
EVERY_S = 0.01


def evict(model):
    """Take the checkpoint's files out of the page cache."""
    for path in Path(model).glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def reading_s(model):
    """Seconds to read the checkpoint's files one after the other, from the disk."""
    evict(model)
    began = time.monotonic()
    buffer = bytearray(8 << 20)
    for path in Path(model).glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    seconds = time.monotonic() - began
    evict(model)
    return seconds


def healthy(port):
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
        return answer.status == 200
    return False


class Stages:
    """Each worker's stages: when each was first seen, and its last progress, as `epdctl status` shows it."""

    def __init__(self, began):
        self._began = began
        self.seen = {}          # worker: {stage: [first s, last progress]}

    def __call__(self, status):
        for worker in status["workers"]:
            stage = worker["stage"] if worker["state"] == "STARTING" else "READY"
            stages = self.seen.setdefault(worker["name"], {})
            stages.setdefault(stage, [time.monotonic() - self._began, 0.0])[1] = worker["progress"] or 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="of each worker")
    parser.add_argument("--model", help="checkpoint folder (default: the demo model)")
    parser.add_argument("--shape", choices=random_model.SHAPES, help="make a checkpoint of this shape instead")
    parser.add_argument("--cold", action="store_true", help="with the checkpoint on the disk only")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = Report(args.out)
    with tempfile.TemporaryDirectory(prefix="epdd-start-") as made:
        model = args.model
        if args.shape:
            model = str(random_model.build(Path(made), random_model.SHAPES[args.shape], "bfloat16"))
        if args.cold:
            if not model:
                parser.error("--cold needs --model or --shape")
            report.say(f"the checkpoint's files are read from the disk in {reading_s(model):.2f} s")
        measure(report, model, args.kills)
    report.close()


def measure(report, model, kills):
    port = launch.free_port()
    arguments = ["--port", str(port), *(["--model", model] if model else [])]
    began = time.monotonic()
    with launch.Daemon(*arguments) as daemon:
        health = daemon.until(lambda: healthy(port), every_s=EVERY_S)
        stages = Stages(began)
        daemon.ready(stages, EVERY_S)
        ready = time.monotonic() - began
        report.say(f"start: /health after {health:.2f} s, READY after {ready:.2f} s")
        header = ["worker", *STAGES, "READY"]
        report.table("Seconds from the command until a stage began, and its last progress", header, [
            [name, *(f"{seen[stage][0]:.2f}, {100 * seen[stage][1]:.0f} %" if stage in seen else None
                     for stage in STAGES), seen["READY"][0]] for name, seen in stages.seen.items()])
        for worker in daemon.status()["workers"]:
            away(report, daemon, worker["name"], kills)
        report.say(f"daemon: {daemon.status()['rss_bytes'] / 1e6:.1f} MB resident")


def away(report, daemon, name, kills):
    def worker():
        return next(one for one in daemon.status()["workers"] if one["name"] == name)

    seconds = []
    for _ in range(kills):
        pid = worker()["pid"]
        os.kill(pid, signal.SIGKILL)
        seconds.append(daemon.until(lambda: worker()["state"] == "READY" and worker()["pid"] not in (pid, None),
                                    every_s=EVERY_S))
    if seconds:
        report.say(f"{name}: READY again after {statistics.median(seconds):.2f} s (median of {kills}), worst "
                   f"{max(seconds):.2f} s")


if __name__ == "__main__":
    main()
