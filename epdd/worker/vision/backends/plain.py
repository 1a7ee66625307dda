"""The backend of a tower as transformers has it: oneDNN's packed products if they are right, else torch's own."""

from __future__ import annotations

import numpy as np
import torch

from epdd import wire
from epdd.worker.kernels import onednn
from epdd.worker.vision.backends import cpu
from epdd.worker.vision.backends.choice import PROBE_PATCHES, BackendChoice, first_line
from epdd.worker.vision.plain_tower import PlainTower


def choose(tower: PlainTower) -> BackendChoice:
    """`tower` is changed.  Nothing is timed: packed products are never much slower, see `onednn`."""
    plain = cpu.Plain()
    if tower.device.type != "cpu":
        return BackendChoice(plain.name, tower, (wire.Trial(plain.name),))
    _, grid = tower.blank(PROBE_PATCHES)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    probe = torch.from_numpy(tower.prepare(noise, grid))
    wanted = tower(probe, [grid])
    note = _packed(tower, probe, grid, wanted)
    if note:
        tower.reload()
    name = plain.name if note else cpu.Prepacked.name
    return BackendChoice(name, tower, (wire.Trial(plain.name), wire.Trial(cpu.Prepacked.name, note=note)))


def _packed(tower: PlainTower, probe: torch.Tensor, grid: tuple[int, int, int], wanted: list[torch.Tensor]) -> str:
    """Pack the tower's products; why they cannot be used, or empty."""
    try:
        if not onednn.pack(tower.module):
            return "this torch has no prepacked products"
        return cpu.Plain().refusal(tower(probe, [grid]), wanted)
    except Exception as error:
        return first_line(error)
