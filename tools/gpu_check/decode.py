"""Decode and prefill of a language model of true widths: tokens a second, and the share of the memory's rate."""

from __future__ import annotations

import statistics
import time
from typing import Any

from tests.worker.language import pd
from tools.gpu_check.parts import Check

PROMPT_TOKENS, STEPS = 512, 96


def measure(check: Check) -> None:
    prompt_tokens, steps, batches = (PROMPT_TOKENS, STEPS, (1, 8, 32)) if not check.cpu else (64, 8, (1, 4))
    rate = copy_rate(check)
    check.row("memory", rate / 1e9, "GB/s", "copied on the device, read and written")
    bench = pd.Bench(str(check.checkpoint), make=check.runner(), device="cpu" if check.cpu else "cuda:0",
                     dtype=check.dtype, max_batched_tokens=2048 if not check.cpu else 64, max_sequences=max(batches),
                     kv_tokens=max(batches) * 1024, prefix_cache=False)
    began = time.perf_counter()
    bench.engine.warm_up(lambda done: None)
    graphs = bench.runner.graphs
    check.row("warm-up", time.perf_counter() - began, "s",
              f"decode graphs of {', '.join(map(str, graphs.sizes)) if graphs else 'no'} sequences")
    model = bench.runner.language.model
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    config = bench.runner.language.text.config
    kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    for batch in batches:
        seconds = step_seconds(bench, batch, prompt_tokens, steps)
        least = (weights + batch * (prompt_tokens + steps / 2) * kv_bytes) / rate
        check.row(f"batch {batch}", batch / seconds, "tokens/s",
                  f"{1e3 * seconds:.2f} ms a step, {100 * least / seconds:.0f} % of what memory allows")
    bench.runner.graphs = None
    seconds = step_seconds(bench, 1, prompt_tokens, steps)
    check.row("batch 1, no graphs", 1 / seconds, "tokens/s", f"{1e3 * seconds:.2f} ms a step")
    prefill(check, bench, 16 * prompt_tokens if not check.cpu else 2 * prompt_tokens)


def copy_rate(check: Check) -> float:
    """Bytes a second."""
    import torch

    device = check.device()
    source = torch.zeros(1 << (26 if check.cpu else 31), dtype=torch.uint8, device=device.torch)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        device.synchronise()
        began = time.perf_counter()
        target.copy_(source)
        device.synchronise()
        times.append(time.perf_counter() - began)
    return 2 * source.nbytes / statistics.median(times[1:])


def step_seconds(bench: Any, batch: int, prompt_tokens: int, steps: int) -> float:
    """Median seconds of a decode step with `batch` sequences."""
    for i in range(batch):
        bench.submit(f"{batch}-{i}", pd.Prompt([(7 * i + j) % 500 for j in range(prompt_tokens)]),
                     max_tokens=steps + 32, ignore_eos=True)
    while any(request.pending > 1 for request in bench.engine._requests.values()):
        bench.engine.step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        bench.engine.step()
        times.append(time.perf_counter() - began)
    for request in list(bench.engine._requests):
        bench.engine.cancel(request)
    bench.sent.clear()
    return statistics.median(times)


def prefill(check: Check, bench: Any, tokens: int) -> None:
    bench.submit("long", pd.Prompt([j % 500 for j in range(tokens)]), max_tokens=2, ignore_eos=True)
    began = time.perf_counter()
    while not bench.sent:
        bench.engine.step()
    check.row("prefill", tokens / (time.perf_counter() - began), "tokens/s", f"a prompt of {tokens}")
    bench.engine.cancel("long")
