"""An encoder's backends: ways to compute a `Tower`'s products.  `choice` takes the fastest correct one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from epdd.worker.vision.grids import Grid
from epdd.worker.vision.tower import Tower

Planes = list[torch.Tensor]                                 # embeddings, then deepstack features: [rows, hidden] each
Run = Callable[[torch.Tensor, list[Grid]], Planes]          # as Tower.__call__


class Backend(Protocol):
    """Measured on a sample of the tower, then used for the whole."""

    @property
    def name(self) -> str:
        """What status shows."""

    def missing(self, tower: Tower) -> str:
        """What this machine or tower lacks for it; empty: nothing."""

    def prepare(self, tower: Tower) -> Run:
        """The tower made ready, changed in place or wrapped.  If it raises, the backend is not used."""

    def refusal(self, found: Planes, wanted: Planes) -> str:
        """Why planes are too far off those of the tower as loaded; empty: they are not."""


def relative_error(found: Planes, wanted: Planes) -> float:
    """Of the worst plane: the norm of the difference over the norm of what is wanted.  NaN where one is."""
    return float(torch.stack([(a.float() - b.float()).norm() / b.float().norm()
                              for a, b in zip(found, wanted, strict=True)]).max())


def cosine(found: Planes, wanted: Planes) -> float:
    """Of the worst plane: the mean of its rows' cosines.  NaN where one is."""
    return float(torch.stack([functional.cosine_similarity(a.float(), b.float(), dim=-1).mean()
                              for a, b in zip(found, wanted, strict=True)]).min())
