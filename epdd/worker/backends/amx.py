"""The backend of CPUs with AMX, for float32: products and attention by kernels of epdd's own."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from epdd.worker import prepack
from epdd.worker.backends import Run
from epdd.worker.backends.cpu import Plain, end_with_activation
from epdd.worker.native import many
from epdd.worker.native.many import Activation
from epdd.worker.tower import Tower


class Amx(Plain):
    """All products as sums of bfloat16 products, as near as float32's own; weights stay as they lie."""

    name = "amx"

    def missing(self, tower: Tower) -> str:
        if tower.device.type != "cpu":
            return "for CPUs only"
        if tower.dtype is not torch.float32:
            return f"not for {str(tower.dtype).removeprefix('torch.')}"
        return many.missing()

    def prepare(self, tower: Tower) -> Run:
        many.attend_in(tower.module)
        for block in tower.module.blocks:
            block.mlp = end_with_activation(block.mlp, nn.Linear,
                                            partial(many.Linear, activation=Activation.GELU_TANH),
                                            partial(many.Linear, activation=Activation.SILU))
        if not prepack.exchange(tower.module, many.Linear):
            raise RuntimeError("its products are not torch's")
        return tower
