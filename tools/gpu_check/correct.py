"""Correctness: the GPU's tokens against transformers on CPUs, its embeddings against the CPUs' float32."""

from __future__ import annotations

from functools import partial
from typing import Any

from PIL import Image

from tests.models import checkpoints
from tests.worker.language import pd
from tools.gpu_check.parts import Check, Encoding, jpeg, threads

ANSWER_TOKENS = 24


def measure(check: Check) -> None:
    for family in checkpoints.FAMILIES if not check.cpu else ("qwen3_vl",):
        tokens(check, family)
    kernels(check)
    embeddings(check)


def prompts(folder: str) -> list[pd.Prompt]:
    """Text, an image, images between text, two in a row."""
    pictures = [checkpoints.picture(40 + 37 * (i % 5), 120 - 23 * (i % 4), seed=i) for i in range(8)]
    kinds: list[list[int | Image.Image]] = [
        [20], [5, pictures[1], 8], [70], [pictures[2], 40, pictures[3], 30, pictures[4], 2],
        [2, pictures[5], pictures[6], 7], [90, pictures[0], 3]]
    return [pd.prompt(folder, kind, seed=i) for i, kind in enumerate(kinds)]


def answers(check: Check, folder: str, dtype: str, **more: Any) -> list[list[int]]:
    """All prompts at once, through recorded decode steps if the device has them."""
    bench = pd.Bench(folder, make=check.runner(), device="cpu" if check.cpu else "cuda:0", dtype=dtype,
                     max_batched_tokens=64, max_sequences=8, **more)
    bench.engine.warm_up(lambda done: None)
    for i, prompt in enumerate(prompts(folder)):
        bench.submit(str(i), prompt, max_tokens=ANSWER_TOKENS)
    found = bench.run()
    return [found[str(i)] for i in range(len(found))]


def tokens(check: Check, family: str) -> None:
    folder = str(checkpoints.build(check.work / family, family))
    wanted = [checkpoints.reference_generate(folder, prompt.tokens, prompt.images, ANSWER_TOKENS)
              for prompt in prompts(folder)]
    found = answers(check, folder, "float32")
    same = sum(a == b for a, b in zip(found, wanted))
    check.row(f"{family} float32", f"{same} of {len(wanted)}", "answers", "equal to transformers' generate on CPUs")


def kernels(check: Check) -> None:
    """bfloat16: with the flash kernel, recorded steps and fused norms against attention one sequence after another."""
    import torch

    from epdd.worker.gpu import flash

    folder = str(checkpoints.build(check.work / "bfloat16", "qwen3_vl", dtype="bfloat16"))
    device = check.device().torch
    chosen = flash.choose(32, 8, 128, torch.bfloat16, device)
    check.row("attention kernel", chosen[0] if chosen else "none: sdpa by sequence", "",
              f"torch {torch.__version__}")
    found = answers(check, folder, "bfloat16")
    make = check.runner()
    check.runner = lambda: partial(make, kernels={})    # type: ignore[method-assign]
    wanted = answers(check, folder, "bfloat16")
    same = [next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(b)) / len(b) for a, b in zip(found, wanted)]
    check.row("qwen3_vl bfloat16", 100 * sum(same) / len(same), "%", "of each answer equal with and without the kernel")


def embeddings(check: Check) -> None:
    size = (448, 448)
    files = [jpeg(*size, seed) for seed in range(2)]
    exact = Encoding(check, "cpu", threads(), "float32")
    exact.encode(files, size)
    for dtype in ("float32", "bfloat16"):
        found = Encoding(check, "cuda:0", threads(), dtype)
        found.encode(files, size)
        pairs = [(found.embedding(i, size), exact.embedding(i, size)) for i in range(len(files))]
        error = max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)
        check.row(f"embedding {dtype}", error, "", "relative error against float32 on CPUs")
