"""Effect of CPU binding: latency of a decode step beside a working encoder, bound apart and not bound.

    python -m tools.bench.workers.binding --model FOLDER --repeats 5

Three pairs of real workers (prefill-decode and encoder) take turns: bound as in the plan, unbound with the same
threads, and unbound with a thread a CPU each, as torch does by itself.  Prints the median over the repeats of p50 and
p99, images a second of the encoder beside it, and the ratios.
"""

import argparse
import asyncio
import io
import os
import statistics
import sys
import threading
import time
from dataclasses import replace

import numpy as np
from PIL import Image

from epdd import arena, families, placement, wire
from epdd.fleet.process import ForkServer
from epdd.hardware.probe import probe
from epdd.settings.config import Config

ARENA_BYTES = 32 << 20
PROMPT_TOKENS = 64
WARM_STEPS = 8


class Worker:
    """One real worker and the daemon's end of its socket."""

    def __init__(self, server, spec, arena_fd):
        self.socket, theirs = wire.socket_pair()
        self.process = asyncio.run(server.spawn(spec, theirs, arena_fd))
        theirs.close()
        self.socket.settimeout(300)
        self._file = self.socket.makefile("rb")
        ready = self.until(wire.Ready)
        bound = ready.binding
        print(f"  {spec.name} cpus={bound.cpus} memory={bound.mem_nodes} threads={bound.threads} {bound.warning}",
              flush=True)

    def send(self, message, raw):
        self.socket.sendall(wire.pack(message, raw))

    def until(self, kind):
        """The next message of this kind; ends the program if the worker fails."""
        while True:
            header, _ = wire.lengths(self._file.read(wire.HEAD.size))
            message = wire.from_worker(self._file.read(header))
            if isinstance(message, wire.Failed):
                sys.exit(message.message)
            if isinstance(message, kind):
                return message


class Load(threading.Thread):
    """Keeps an encoder busy until stopped."""

    def __init__(self, encoder, family, image):
        super().__init__(daemon=True)
        file = io.BytesIO()
        image.save(file, "PNG")
        self._encoder, self._data = encoder, file.getvalue()
        self._size = image.size
        self._grid = family.grid(*image.size)
        self._rows = family.rows(self._grid)
        self._lease = wire.Lease(0, family.embedding_bytes(self._rows))
        self._ended = threading.Event()
        self.began = threading.Event()
        self.images = 0

    def run(self):
        while not self._ended.is_set():
            self._encoder.send(wire.Encode(f"e{self.images}", self._lease, self._grid, self._rows, self._size),
                               self._data)
            self.began.set()
            self._encoder.until(wire.Encoded)
            self.images += 1

    def stop(self):
        self._ended.set()
        self.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(families.DEMO), help="checkpoint folder (default: the demo model)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="decode steps a measurement")
    parser.add_argument("--side", type=int, default=448, help="of the square image that is encoded")
    args = parser.parse_args()
    family = families.load(args.model)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (args.side, args.side, 3), np.uint8))
    server, fd = ForkServer(["epdd.worker.preload"]), arena.create(ARENA_BYTES)
    pairs = {}
    for name, specs in variants(args.model, family).items():
        print(name, flush=True)
        pairs[name] = [Worker(server, spec, fd) for spec in specs]
    results = {name: [] for name in pairs}
    for _ in range(args.repeats):
        for name, (pd, encoder) in pairs.items():
            results[name].append(measure(pd, Load(encoder, family, image), args.steps))
    report(results)
    server.stop()


def variants(model, family):
    """(prefill-decode, encoder) specs of each variant; the first is the plan's."""
    config = Config().with_values("arena", {"bytes": ARENA_BYTES}, "bench")
    specs = placement.plan(probe(), config, replace(family, folder=model), ARENA_BYTES)
    on_cpus = [next((spec for spec in specs if (spec.role, spec.device) == (role, "cpu")), None)
               for role in ("pd", "encoder")]
    if None in on_cpus:
        sys.exit("the plan has no prefill-decode worker or no encoder on CPUs: nothing to compare")
    bound = [replace(spec, kv_tokens=4096) for spec in on_cpus]
    unbound = [replace(spec, cpus=(), numa_node=None) for spec in bound]
    every_cpu = len(os.sched_getaffinity(0))
    return {"bound apart": bound, "unbound": unbound,
            "unbound, a thread a CPU": [replace(spec, threads=every_cpu) for spec in unbound]}


def measure(pd, load, steps):
    """(p50, p99, images a second): decode steps in seconds, beside the load."""
    load.start()
    load.began.wait()
    sampling = wire.Sampling(max_tokens=WARM_STEPS + steps, temperature=0.0, ignore_eos=True)
    pd.send(wire.Generate("g", (), sampling), np.full(PROMPT_TOKENS, 5, np.int32).tobytes())
    times = []
    while len(times) < WARM_STEPS + steps:
        times += [time.perf_counter()] * len(pd.until(wire.Tokens).ids)
        if len(times) == WARM_STEPS:
            images = load.images
    seconds = times[-1] - times[WARM_STEPS - 1]
    images = load.images - images
    pd.until(wire.Done)
    load.stop()
    gaps = sorted(b - a for a, b in zip(times[WARM_STEPS - 1:], times[WARM_STEPS:]))
    return gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)], images / seconds


def report(results):
    medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in results.items()}
    base = medians["bound apart"]
    print(f"\n{'':24} {'p50 ms':>8} {'p99 ms':>8} {'images/s':>9}   ratio to bound: p50   p99  images/s")
    for name, (p50, p99, images) in medians.items():
        ratios = [value / first if first else 0.0 for value, first in zip((p50, p99, images), base)]
        print(f"{name:24} {1e3 * p50:8.2f} {1e3 * p99:8.2f} {images:9.2f}   {ratios[0]:19.2f} {ratios[1]:5.2f} "
              f"{ratios[2]:9.2f}")


if __name__ == "__main__":
    main()
