"""Decode speed against the memory's rate: epdd, with and without its compiled kernels, and transformers.

    python -m tools.bench.workers.decode --out build/decode

A step reads all weights of the language model once, whatever the batch: its limit is the rate at which the same threads
read memory, measured before each round as a sum and as one large product of one row; the highest rate is the limit.
The variants take turns with the same random checkpoint (tools/random_model.py), decode the same prompts and compute one
prefill of 512 tokens.  Steps are timed one by one.  Prints medians over the rounds, and whether the tokens equal those
of transformers.

On a machine that others use at the same time, `--threads 1 --clock cpu` counts only the time that the thread ran.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools import random_model     # before transformers: keeps it off the network
from tools.bench import plots
import torch

from tools.bench.report import Report
from torch import nn
from transformers import AutoModelForImageTextToText, LogitsProcessor, LogitsProcessorList

from epdd import wire
from epdd.worker.kernels import mkl, native
from epdd.worker.language import cpu_layer
from epdd.worker.language.cpu_runner import CpuModelRunner
from epdd.worker.language.engine import Engine

CONTESTANTS = ("epdd", "epdd without kernels", "transformers")
PREFILL = 512               # tokens: a full chunk of epdd's
READ_BYTES = 512 << 20      # larger than any cache
READ_COLUMNS = 2048
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


@dataclass
class Found:
    """Results of one variant with one checkpoint; a batch's values are medians over the rounds."""

    weight_bytes: int = 0                                       # bytes that a step reads
    read_rates: list[float] = field(default_factory=list)       # bytes a second of memory, measured beside it
    step_s: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[list[int]]] = field(default_factory=dict)
    prefill: float = 0.0                                        # tokens a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["100m", "500m"], choices=random_model.SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--prompt", type=int, default=64, help="tokens before the first that is decoded")
    parser.add_argument("--steps", type=int, default=12, help="timed in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--models", type=Path, help="folder to keep the checkpoints in")
    parser.add_argument("--out", type=Path, help="folder for JSON and plots")
    args = parser.parse_args()
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu counts one thread: it needs --threads 1")
    mkl.warm_up_vml()
    torch.set_num_threads(args.threads)
    report = Report(args.out)
    panels = []
    with tempfile.TemporaryDirectory() as temporary:
        for shape in args.shapes:
            for dtype in args.dtypes:
                folder = (args.models or Path(temporary)) / f"{shape}-{dtype}"
                if not (folder / "model.safetensors").exists():
                    random_model.build(folder, random_model.SHAPES[shape], dtype)
                found = {name: measure(name, str(folder), dtype, args) for name in args.contestants}
                limit = max(rate for one in found.values() for rate in one.read_rates)
                tell(report, f"{shape} {dtype}", found, limit)
                panels.append(plots.Panel(f"{shape} {dtype}", "share of the bandwidth limit", {
                    name: [(batch, one.weight_bytes / seconds / limit) for batch, seconds in one.step_s.items()]
                    for name, one in found.items()}))
    report.plot("decode", f"Decode, {args.threads} threads, {args.clock} clock", "batch", panels)
    report.close(threads=args.threads, clock=args.clock, rounds=args.rounds, steps=args.steps)


def measure(name: str, folder: str, dtype: str, args: argparse.Namespace) -> Found:
    make = Transformers if name == "transformers" else Epdd
    with kernels(name == "epdd"):
        contestant = make(folder, dtype, args)
    found = Found(contestant.weight_bytes)
    readers = memory_readers()
    for batch in args.batches:
        prompts = [prompt(args.prompt, seed) for seed in range(batch)]
        contestant.decode(prompts, 3)       # warms up
        steps = []
        for _ in range(args.rounds):
            found.read_rates += [READ_BYTES / least(read, args.clock) for read in readers]
            seconds, found.tokens[batch] = contestant.decode(prompts, args.steps)
            steps.append(seconds)
        found.step_s[batch] = statistics.median(steps)
    long = prompt(PREFILL, 1 << 20)
    contestant.prefill(long)
    found.prefill = PREFILL / statistics.median(contestant.prefill(long) for _ in range(args.rounds))
    del contestant
    gc.collect()
    return found


def memory_readers() -> list[Callable[[], Any]]:
    """Ways to read this many bytes once: which is fastest depends on the machine."""
    matrix = nn.Linear(READ_COLUMNS, READ_BYTES // 4 // READ_COLUMNS, bias=False).requires_grad_(False)
    row = torch.ones(1, READ_COLUMNS)
    return [matrix.weight.sum, partial(native.FewRowsLinear(matrix), row)]


def least(call: Callable[[], Any], clock: str, times: int = 3) -> float:
    now, taken = CLOCKS[clock], []
    for _ in range(times):
        began = now()
        call()
        taken.append(now() - began)
    return min(taken)


@contextmanager
def kernels(wanted: bool) -> Iterator[None]:
    """Switch the kernels off, as if they could not be compiled."""
    install = cpu_layer.install
    if not wanted:
        cpu_layer.install = lambda model, pool: False
    yield
    cpu_layer.install = install


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(300, 900, length).tolist()


class Epdd:
    """The PD worker's engine, in this process."""

    def __init__(self, folder: str, dtype: str, args: argparse.Namespace) -> None:
        self._now = CLOCKS[args.clock]
        self._sent: list[wire.FromWorker] = []
        spec = wire.WorkerSpec(role="pd", name="pd/0", model=folder, device="cpu", cpus=(), numa_node=None,
                               threads=args.threads, dtype=dtype, arena_bytes=0, kv_tokens=8192, prefix_cache=False)
        runner = CpuModelRunner(spec, None, self._sent.append)
        self._engine = Engine(spec, runner, self._sent.append)
        embedding = sum(p.nbytes for p in runner.language.embed.parameters())
        self.weight_bytes = runner.ready.parameters * runner.language.dtype.itemsize - embedding

    def decode(self, prompts: list[list[int]], steps: int) -> tuple[float, list[list[int]]]:
        """Median seconds of a step with all of them, and their tokens."""
        self._sent.clear()
        for i, tokens in enumerate(prompts):
            self._submit(str(i), tokens, steps + 1 + len(prompts))
        running = self._engine._scheduler.running
        while len(running) < len(prompts) or any(s.pending > 1 for s in running):
            self._engine.step()
        seconds = []
        for _ in range(steps):
            began = self._now()
            self._engine.step()
            seconds.append(self._now() - began)
        for i in range(len(prompts)):
            self._engine.cancel(str(i))
        answers: list[list[int]] = [[] for _ in prompts]
        for message in self._sent:
            if isinstance(message, wire.Tokens):
                answers[int(message.id)] += message.ids
        return statistics.median(seconds), answers

    def prefill(self, tokens: list[int]) -> float:
        self._submit("long", tokens, 1)
        began = self._now()
        self._engine.step()
        taken = self._now() - began
        assert not self._engine.busy, "a prefill takes one step"
        return taken

    def _submit(self, name: str, tokens: list[int], count: int) -> None:
        sampling = wire.Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
        self._engine.submit(wire.Generate(name, (), sampling), np.array(tokens, np.int32).tobytes())


class Clock(LogitsProcessor):  # type: ignore[misc]
    """Takes the time of each step's logits in `generate`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(self._now())
        return scores


class Transformers:
    """The whole model's own `generate`."""

    def __init__(self, folder: str, dtype: str, args: argparse.Namespace) -> None:
        self._now = CLOCKS[args.clock]
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.weight_bytes = sum(p.nbytes for p in self._model.get_decoder().layers.parameters()) \
            + self._model.get_output_embeddings().weight.nbytes

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], steps: int) -> tuple[float, list[list[int]]]:
        ids, clock = torch.tensor(prompts), Clock(self._now)
        out = self._model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                   mm_token_type_ids=torch.zeros_like(ids), max_new_tokens=steps + 1,
                                   min_new_tokens=steps + 1, logits_processor=LogitsProcessorList([clock]))
        return statistics.median(np.diff(clock.times)), out[:, ids.shape[1]:].tolist()

    @torch.inference_mode()
    def prefill(self, tokens: list[int]) -> float:
        ids = torch.tensor([tokens])
        began = self._now()
        self._model(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids), use_cache=True, logits_to_keep=1)
        return self._now() - began


def tell(report: Report, title: str, found: dict[str, Found], limit: float) -> None:
    report.say(f"{title}: memory is read at {limit / 1e9:.1f} GB/s")
    base = found.get("transformers")
    rows = []
    for name, one in found.items():
        for batch, seconds in one.step_s.items():
            same = None if base is None else alike(one.tokens[batch], base.tokens[batch])
            rows.append([name, batch, 1e3 * seconds, batch / seconds, 100 * one.weight_bytes / seconds / limit,
                         None if base is None else base.step_s[batch] / seconds, same])
    report.table(f"{title}: a decode step", ["", "batch", "ms", "tokens/s", "% of limit", "x transformers",
                                             "same tokens"], rows)
    report.table(f"{title}: a prefill of {PREFILL} tokens", ["", "tokens/s", "x transformers"],
                 [[name, one.prefill, None if base is None else one.prefill / base.prefill]
                  for name, one in found.items()])


def alike(tokens: list[list[int]], wanted: list[list[int]]) -> str:
    pairs = [(a, b) for one, other in zip(tokens, wanted) for a, b in zip(one, other)]
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"


if __name__ == "__main__":
    sys.exit(main())
