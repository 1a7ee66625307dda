"""Checks that cost grows linearly with a request's images and with a server's streams.

    python -m tools.random_model R --shape 100m
    python -m tools.bench.serving.linear --model R --out linear

One request with 1, 2, 4 ... images, new ones each time: seconds to its first token, and the CPU seconds that daemon,
encoder and prefill-decode worker spent on it.  Then 1, 2, 4 ... streams of text that begin together: seconds to the
last token of all, and CPU seconds.  Medians over the rounds; a round takes each count once, so that other load on the
machine is spread over all counts.

Linear growth is checked twice: by a line fitted to time over count with equal relative weights (its R^2), and by the
exponent of a power fitted to the upper half of the counts, where fixed costs matter little (1: linear; less: better).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from tools import launch
from tools.bench import live
import numpy as np
from PIL import Image

from tools.bench.plots import Panel
from tools.bench.report import Report

WORDS = "red green blue circle square triangle left right above below one two three picture shows".split()
IDLE = {"images": "", "streams": "CPU encoder/0"}       # processes that are idle in a series
Row = dict[str, float]      # what was measured -> seconds


def body(rng: random.Random, images: int, side: int, words: int, tokens: int) -> bytes:
    """A streaming request with a unique beginning."""
    parts = []
    for _ in range(images):
        pixels = np.frombuffer(rng.randbytes(8 * 8 * 3), np.uint8).reshape(8, 8, 3)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG")
        url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    text = " ".join(rng.choices(WORDS, k=words))
    return json.dumps({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
                       "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}).encode()


def cpu_s(pid: int) -> float:
    """CPU seconds of all its threads, to the nanosecond; /proc/PID/stat counts in hundredths of a second."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def measure(daemon: launch.Daemon, bodies: Sequence[bytes]) -> Row:
    """All at once: "wall" seconds until the last is answered, and CPU seconds by process."""
    pids = {"daemon": daemon.pid} | {worker["name"]: worker["pid"] for worker in daemon.status()["workers"]}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    answers = await live.open_loop(daemon.chat_url, [0.0] * len(bodies), bodies, time.monotonic() + 0.1)
    row = {f"CPU {name}": cpu_s(pid) - before[name] for name, pid in pids.items()}
    return row | {"wall": max(answer.last for answer in answers) - min(answer.sent for answer in answers)}


def powers(most: int) -> list[int]:
    """1, 2, 4 ... up to `most`."""
    return [1 << i for i in range(most.bit_length())]


async def rounds(args: argparse.Namespace, daemon: launch.Daemon) -> dict[str, dict[int, Row]]:
    """Medians by series and count."""
    rng = random.Random(args.seed)
    series = {"images": powers(args.images), "streams": powers(args.streams)}
    found: dict[str, dict[int, list[Row]]] = {name: {count: [] for count in counts} for name, counts in series.items()}
    for number in range(args.rounds + 1):
        for name, counts in series.items():
            for count in counts if number else (1, 2):      # the first round warms up
                if name == "images":
                    bodies = [body(rng, count, args.side, 8, 1)]
                else:
                    bodies = [body(rng, 0, 0, args.isl, args.osl) for _ in range(count)]
                row = await measure(daemon, bodies)
                if number:
                    found[name][count].append(row)
    return {name: {count: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
                   for count, rows in counts.items()} for name, counts in found.items()}


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(a, b, R^2) of a + b x, least squares of relative errors, so that large counts do not dominate."""
    x, y = np.array(points).T
    b, a = np.polyfit(x, y, 1, w=1 / y)
    left = np.sum(((a + b * x - y) / y) ** 2)
    mean = np.sum(1 / y) / np.sum(1 / y ** 2)       # of the best constant, by the same measure
    return float(a), float(b), float(1 - left / np.sum(((mean - y) / y) ** 2))


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Exponent of the power that fits the upper half of the counts best."""
    upper = points[len(points) // 2:]
    return float(np.polyfit(*np.log(np.array(upper)).T, 1)[0])


def write(report: Report, args: argparse.Namespace, found: dict[str, dict[int, Row]]) -> None:
    titles = {"images": f"One request with n images of {args.side} x {args.side}: seconds to its first token",
              "streams": f"n streams of text together, {args.isl} words in, {args.osl} tokens out: seconds to the end"}
    fits, panels = [], []
    for name, rows in found.items():
        keys = list(next(iter(rows.values())))
        report.table(titles[name], [name, *keys, "wall for each"],
                     [[count, *(row[key] for key in keys), row["wall"] / count] for count, row in rows.items()])
        for key in keys:
            points = [(float(count), row[key]) for count, row in rows.items()]
            if key != IDLE[name]:
                a, b, r2 = line(points)
                fits.append([name, key, f"{a:.4f}", f"{b:.4f}", f"{r2:.4f}", exponent(points)])
        a, b, _ = line([(float(count), row["wall"]) for count, row in rows.items()])
        panels.append(Panel(titles[name].partition(":")[0], "seconds", {
            "wall": [(count, row["wall"]) for count, row in rows.items()],
            "fitted line": [(count, a + b * count) for count in rows],
            **{key: [(count, row[key]) for count, row in rows.items()] for key in keys if key != "wall"}}))
    report.table("Fits: a + b n over all counts, and the exponent of n over the upper half of them",
                 ["series", "seconds", "a", "b", "R^2", "exponent"], fits)
    report.plot("linear", "Growth of cost", "n", panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder (default: the demo model)")
    parser.add_argument("--images", type=int, default=32, help="most images in one request")
    parser.add_argument("--side", type=int, default=224, help="of the square images, in pixels")
    parser.add_argument("--streams", type=int, default=64, help="most streams at once")
    parser.add_argument("--isl", type=int, default=16, help="words of a stream's prompt")
    parser.add_argument("--osl", type=int, default=32, help="tokens of a stream's answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the daemon")
    parser.add_argument("--out", type=Path, default=None, help="folder for numbers and plots")
    args = parser.parse_args()
    settings = [f"media.max_images={args.images}", *args.set]
    with launch.Daemon(*(["--model", args.model] if args.model else []), settings=settings) as daemon:
        daemon.ready()
        found = asyncio.run(rounds(args, daemon))
    report = Report(args.out)
    write(report, args, found)
    report.close(found=found, settings={key: str(value) for key, value in vars(args).items()})


if __name__ == "__main__":
    main()
