"""The parts of tools/gpu_check, each run as a process of its own; each row is written as soon as it is known."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from epdd import arena, families, wire
from tools import random_model

# Qwen3-VL-8B at its true widths with 16 of its 36 language layers: 3.1 billion parameters and 0.6 of output rows.
# Its vision tower is complete.
TRUE_SIZE = random_model.Shape(
    hidden=4096, layers=16, heads=32, kv_heads=8, inter=12288, vocab=151936, head_dim=128, max_model_len=65536,
    vision_hidden=1152, vision_layers=27, vision_heads=16, vision_inter=4304)
SMALL = replace(random_model.SHAPES["tiny"], side_max=512)
PICTURE_TFLOP = {"448 px": 0.79, "1080p": 15.7}         # of that tower: docs/benchmarks/encoder.md
SEED = 20


class Check:
    """The machine, as a part sees it, and the file of its rows."""

    def __init__(self, part: str, out: Path, work: Path, cpu: bool) -> None:
        self.part, self.out, self.work, self.cpu = part, out, work, cpu
        self.checkpoint = work / "checkpoint"
        self.dtype = "float32" if cpu else "bfloat16"

    def row(self, what: str, value: float | int | str, unit: str = "", note: str = "") -> None:
        row = {"part": self.part, "what": what, "value": value, "unit": unit, "note": note}
        with open(self.out / f"{self.part}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    def device(self) -> Any:
        """epdd.worker.kernels.cuda.Device, or its fake in the host's memory."""
        if self.cpu:
            return importlib.import_module("tests.worker.fake_cuda").FakeDevice()
        return importlib.import_module("epdd.worker.kernels.cuda").Device("cuda:0")

    def runner(self) -> Callable[..., Any]:
        """The model runner's class for this device."""
        from epdd.worker.gpu import flash, runner

        if not self.cpu:
            return runner.GpuModelRunner
        return partial(runner.GpuModelRunner, device=self.device(), kernels={"by sequence": flash.by_sequence})


def jpeg(width: int, height: int, seed: int) -> bytes:
    """A picture of blurred noise as a file, unique to the seed."""
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 16, 3), np.uint8))
    file = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


class Encoding:
    """An encoder's role in this process."""

    def __init__(self, check: Check, device: str, threads: int = 1, dtype: str = "auto") -> None:
        import torch

        from epdd.worker import bootstrap

        torch.set_num_threads(threads)
        self.family = families.load(str(check.checkpoint))
        size = 1 << (26 if check.cpu else 30)
        self.arena = arena.Mapping(arena.create(size), size)
        self.sent: list[wire.FromWorker] = []
        spec = wire.WorkerSpec(name="encoder/0", role="encoder", device=device, cpus=(), numa_node=None,
                               threads=threads, model=str(check.checkpoint), dtype=dtype, arena_bytes=size)
        more = {"device": check.device()} if check.cpu and device != "cpu" else {}
        self.role = bootstrap.role_of(spec)(spec, self.arena, self.sent.append, **more)
        self.ready = self.role.warm_up(lambda done: None)

    def encode(self, files: Sequence[bytes], size: tuple[int, int]) -> float:
        """Seconds for all of these pictures of one size, from the first's arrival; embeddings lie one after another."""
        grid = self.family.grid(*size)
        rows = self.family.rows(grid)
        each = self.family.embedding_bytes(rows, self.ready.dtype)
        self.sent.clear()
        began = time.perf_counter()
        for i, file in enumerate(files):
            self.role.submit(wire.Encode(str(i), wire.Lease(each * i, each), grid, rows, size), file)
        while self.role.busy:
            self.role.step()
        seconds = time.perf_counter() - began
        failed = [message for message in self.sent if isinstance(message, wire.Failed)]
        if failed or len(self.sent) < len(files):
            raise SystemExit(f"not encoded: {failed}")
        return seconds

    def embedding(self, i: int, size: tuple[int, int]) -> Any:
        """The `i`th picture's rows, as float32."""
        import torch

        rows = self.family.rows(self.family.grid(*size))
        each = self.family.embedding_bytes(rows, self.ready.dtype)
        flat = torch.frombuffer(self.arena.view(wire.Lease(each * i, each)), dtype=getattr(torch, self.ready.dtype))
        return flat.float().clone()


def threads() -> int:
    """One for each core that this process may use."""
    from epdd.hardware.probe import probe

    return probe().cores


# --- parts


def checkpoint(check: Check) -> None:
    began = time.perf_counter()
    random_model.build(check.checkpoint, SMALL if check.cpu else TRUE_SIZE, check.dtype, seed=SEED,
                       device="cpu" if check.cpu else "cuda:0")
    size = sum(path.stat().st_size for path in check.checkpoint.iterdir())
    check.row("written", size / 1e9, "GB", f"in {time.perf_counter() - began:.0f} s")


def correct(check: Check) -> None:
    importlib.import_module("tools.gpu_check.correct").measure(check)


def encoder(check: Check) -> None:
    encoding = Encoding(check, "cuda:0", threads=threads())
    check.row("type", encoding.ready.dtype, "", ", ".join(f"{n} patches {1e3 * s:.0f} ms"
                                                          for n, s in encoding.ready.samples))
    for name, size, count in (("448 px", (448, 448), 4 if check.cpu else 96),
                              ("1080p", (640, 360) if check.cpu else (1920, 1080), 2 if check.cpu else 8)):
        files = [jpeg(*size, seed) for seed in range(count)]
        encoding.encode(files[:2], size)
        rate = count / statistics.median(encoding.encode(files, size) for _ in range(1 if check.cpu else 3))
        check.row(name, rate, "images/s", f"{rate * PICTURE_TFLOP[name]:.0f} TFLOP/s, decoding and resizing included"
                  if not check.cpu else "of a tiny tower, smaller")


def ratio(check: Check) -> None:
    """How much faster the GPU encodes than these CPUs: the router's R."""
    rates = {}
    for line in (check.out / "encoder.jsonl").read_text().splitlines():
        row = json.loads(line)
        rates[row["what"]] = row["value"]
    encoding = Encoding(check, "cpu", threads=threads())
    check.row("CPU type", encoding.ready.dtype, "", f"{threads()} cores")
    for name, size in (("448 px", (448, 448)), ("1080p", (640, 360) if check.cpu else (1920, 1080))):
        seconds = encoding.encode([jpeg(*size, 1)], size)
        check.row(f"CPU {name}", seconds, "s an image")
        check.row(f"R at {name}", seconds * rates[name], "", "a GPU's images for one of the CPUs")


def decode(check: Check) -> None:
    importlib.import_module("tools.gpu_check.decode").measure(check)


def handover(check: Check) -> None:
    importlib.import_module("tools.gpu_check.handover").measure(check)


def serve(check: Check) -> None:
    importlib.import_module("tools.gpu_check.serve").measure(check)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {part.__name__: part for part in (checkpoint, correct, encoder, ratio, decode, handover, serve)}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    parts[args.part](Check(args.part, args.out, args.work, args.cpu))


if __name__ == "__main__":
    main()
