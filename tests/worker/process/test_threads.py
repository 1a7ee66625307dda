"""Threads of real workers, by /proc: one computing thread for each bound core, and none on other CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from epdd import families, wire
from tests.worker.language import pd
from tests.worker.test_bootstrap import Start, Worker, image_bytes, start      # noqa: F401

CPUS = tuple(sorted(os.sched_getaffinity(0)))
COMPUTED_NS = 1_000_000     # on a CPU; a thread that only began to sleep has some 30,000
# Two threads on one CPU would be cut to one, so the wider worker needs a second CPU.
WIDTHS = [1, pytest.param(2, marks=pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs"))]


def threads(worker: Worker) -> tuple[list[tuple[str, str]], set[str]]:
    """(name, allowed CPUs) of each thread that computes or helps, and the allowed CPUs of all there are.

    torch.set_num_threads also makes a pool for mobile kernels, which is never used: its threads only sleep.
    """
    found, everywhere = [], set()
    for task in Path(f"/proc/{worker.process.pid}/task").iterdir():
        fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        name, cpus = fields["Name"], fields["Cpus_allowed_list"]
        everywhere.add(cpus)
        if not name.startswith("epdd ") or int((task / "schedstat").read_text().split()[0]) > COMPUTED_NS:
            found.append((name, cpus))
    return sorted(found), everywhere


def listed(cpus: tuple[int, ...]) -> str:
    """As /proc writes one CPU or two."""
    if len(cpus) == 2:
        return f"{cpus[0]}-{cpus[1]}" if cpus[1] == cpus[0] + 1 else f"{cpus[0]},{cpus[1]}"
    return str(cpus[0])


@pytest.mark.parametrize("width", WIDTHS)
def test_an_encoder(checkpoint: Callable[..., str], start: Start, width: int) -> None:      # noqa: F811
    folder, cpus = checkpoint("qwen3_vl"), CPUS[-width:]
    worker = start(folder, "encoder", cpus=cpus, threads=width, arena_slice=(0, pd.ARENA_BYTES))
    ready = worker.until(wire.Ready)[-1]
    assert isinstance(ready, wire.Ready)
    assert (ready.binding.cpus, ready.binding.threads) == (cpus, width)
    family = families.load(folder)
    grid = family.grid(100, 60)
    lease = wire.Lease(0, family.embedding_bytes(family.rows(grid)))
    worker.send(wire.Encode("a", lease, grid, family.rows(grid), (100, 60)), image_bytes(100, 60))
    worker.until(wire.Encoded)
    named = [("epdd encoder/0", listed(cpus))] * width + [("hang-up", listed(cpus)), ("preprocess", listed(cpus))]
    assert threads(worker) == (named, {listed(cpus)})


@pytest.mark.parametrize("width", WIDTHS)
def test_a_pd_worker(checkpoint: Callable[..., str], start: Start, width: int) -> None:     # noqa: F811
    folder, cpus = checkpoint("qwen3_vl"), CPUS[-width:]
    worker = start(folder, "pd", cpus=cpus, threads=width)
    worker.until(wire.Ready)
    worker.send(wire.Generate("a", (), wire.Sampling(max_tokens=8, ignore_eos=True)),
                np.arange(300, dtype=np.int32).tobytes())
    worker.until(wire.Done)
    named = [("epdd pd/0", listed(cpus))] * width + [("hang-up", listed(cpus))]
    assert threads(worker) == (named, {listed(cpus)})


def test_threads_are_cut_to_the_cpus_in_force(checkpoint: Callable[..., str], start: Start) -> None:    # noqa: F811
    """As when a cpuset took CPUs between plan and start."""
    worker = start(checkpoint("qwen3_vl"), "pd", cpus=(CPUS[0], 8000), threads=2)
    ready = worker.until(wire.Ready)[-1]
    assert isinstance(ready, wire.Ready)
    assert (ready.binding.cpus, ready.binding.threads) == ((CPUS[0],), 1)
    assert ready.binding.warning == "CPUs 8000 not bound: outside the allowed CPUs"
    assert threads(worker) == ([("epdd pd/0", str(CPUS[0])), ("hang-up", str(CPUS[0]))], {str(CPUS[0])})
