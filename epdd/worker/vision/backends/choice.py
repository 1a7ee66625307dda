"""Chooses an encoder's backend: the fastest whose planes are right, by a short measurement at warm-up.

Measured on one block of the tower, so that it costs little time and memory; the fastest is then compared with the whole
tower as loaded.  The outcome is remembered, so that a worker that starts again measures nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from epdd import wire
from epdd.worker.vision.backends import Backend, Planes, Run, amx, cpu, cuda, remembered
from epdd.worker.vision.grids import Grid
from epdd.worker.vision.tower import Tower

log = logging.getLogger(__name__)

SAMPLE_PATCHES = 784        # 448 x 448: products are as large as they need be for their full rate
PROBE_PATCHES = 64          # compared with the whole tower: enough rows to show an error, seconds even on one slow core
ROUNDS_MAX = 5
MEASURE_S = 3.0             # no further round begins after this
SLOW = 10.0                 # times torch's time in the first run: measuring it would take too long


@dataclass(frozen=True)
class BackendChoice:
    """The backend in use, and the trial of each."""

    name: str
    run: Run
    trials: tuple[wire.Trial, ...]


def candidates(device: torch.device, quantize: str) -> list[Backend]:
    """What may be measured for a device, plain torch first: the others are compared with it."""
    if device.type != "cpu":
        return [cpu.Plain(), cuda.Flash(), cuda.VarlenAttention()]
    return [cpu.Plain(), cpu.Prepacked(), amx.Amx(), cpu.Ipex(), *([cpu.Int8()] if quantize == "int8" else [])]


def choose(tower: Tower, backends: Sequence[Backend], memory: remembered.Memory,
           progress: Callable[[float], None]) -> BackendChoice:
    """The fastest correct backend, prepared; `tower` is changed.  `progress` gets 0..1."""
    known = memory.read()
    backend = next((b for b in backends if known is not None and b.name == known.backend), None)
    if known is not None and backend is not None:
        try:
            return BackendChoice(backend.name, backend.prepare(tower), known.trials)
        except Exception as error:
            log.warning("encoder backend %s, remembered, does not start: %s", backend.name, first_line(error))
            tower.reload()
    trials = {trial.backend: trial for trial in measure(tower, backends, progress)}
    for name in sorted((t.backend for t in trials.values() if not t.note), key=lambda name: trials[name].seconds):
        backend = next(b for b in backends if b.name == name)
        run, note = _adopt(tower, backend, plain=backend is backends[0])
        if not note:
            break
        log.warning("encoder backend %s refused: %s", name, note)
        trials[name] = wire.Trial(name, trials[name].seconds, note)
        tower.reload()
    choice = BackendChoice(name, run, tuple(trials.values()))
    memory.write(remembered.Known(choice.name, choice.trials))
    return choice


@torch.inference_mode()  # type: ignore[untyped-decorator]
def measure(tower: Tower, backends: Sequence[Backend], progress: Callable[[float], None]) -> list[wire.Trial]:
    """Each backend on one block: its least time, since other load on the machine only adds to it."""
    runs: dict[str, Run] = {}
    notes: dict[str, str] = {}
    small, large = probe(tower, PROBE_PATCHES), probe(tower, SAMPLE_PATCHES)
    first: tuple[Planes, float] | None = None
    for i, backend in enumerate(backends):
        progress(i / (2 * len(backends)))
        notes[backend.name] = backend.missing(tower)
        if notes[backend.name]:
            continue
        try:
            run = backend.prepare(tower.sample())
            run(*small)     # makes tables and whatever else a first run makes
            begin = time.perf_counter()
            found = run(*small)
            took = time.perf_counter() - begin
            if first is None:
                first = found, took
            elif took > SLOW * first[1]:
                notes[backend.name] = f"{took / first[1]:.0f} times as slow as {backends[0].name}"
            else:
                notes[backend.name] = backend.refusal(found, first[0])
        except Exception as error:
            if first is None:
                raise       # what torch itself cannot compute, no backend can
            notes[backend.name] = first_line(error)
        if not notes[backend.name]:
            runs[backend.name] = run
    seconds = _race(runs, large, progress) if len(runs) > 1 else {}
    return [wire.Trial(backend.name, seconds.get(backend.name, 0.0), notes[backend.name]) for backend in backends]


def probe(tower: Tower, patches: int) -> tuple[torch.Tensor, list[Grid]]:
    """A square image of about `patches` patches: smooth shapes under noise, the same each time."""
    info = tower.info
    side = tower.side(patches)
    rng = np.random.default_rng(0)
    shapes = rng.integers(0, 256, (side * side, 3, 1), np.uint8)
    noise = rng.integers(-16, 17, (side * side, 3, info.patch ** 2))
    data = (shapes + noise).clip(0, 255).astype(np.uint8).reshape(side * side, -1)
    return torch.from_numpy(data).to(tower.device), [(1, side, side)]


def _race(runs: dict[str, Run], large: tuple[torch.Tensor, list[Grid]],
          progress: Callable[[float], None]) -> dict[str, float]:
    """The least time of each.  They take turns, so that other load on the machine meets all."""
    seconds = dict.fromkeys(runs, math.inf)
    begin = time.perf_counter()
    for i in range(ROUNDS_MAX):
        for name, run in runs.items():
            start = time.perf_counter()
            planes = run(*large)
            planes[-1][-1, -1].item()       # a device that works on its own is waited for
            seconds[name] = min(seconds[name], time.perf_counter() - start)
        progress(0.5 + 0.5 * (i + 1) / ROUNDS_MAX)
        if time.perf_counter() - begin > MEASURE_S:
            break
    return seconds


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _adopt(tower: Tower, backend: Backend, plain: bool) -> tuple[Run, str]:
    """The whole tower prepared, and why it cannot be used then; empty: it can."""
    if plain:
        return backend.prepare(tower), ""
    small = probe(tower, PROBE_PATCHES)
    wanted = [plane.clone() for plane in tower(*small)]
    try:
        run = backend.prepare(tower)
        return run, backend.refusal(run(*small), wanted)
    except Exception as error:
        return tower, first_line(error)


def first_line(error: Exception) -> str:
    """An error as the note of a trial."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
