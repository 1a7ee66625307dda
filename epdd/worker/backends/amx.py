"""The backend of CPUs with AMX, for float32: products and attention by kernels of epdd's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from epdd.worker import prepack
from epdd.worker.backends import Run
from epdd.worker.backends.cpu import GELU_TANH, SILU, Plain, SwiGLU
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
            block.mlp = _fused(block.mlp)
        if not prepack.exchange(tower.module, many.Linear):
            raise RuntimeError("its products are not torch's")
        return tower


def _fused(mlp: Any) -> nn.Module:
    """A block's feed-forward part with its activation inside a product, where it is one that the kernels know."""
    if hasattr(mlp, "linear_fc1") and isinstance(mlp.act_fn, GELU_TANH):
        mlp.linear_fc1, mlp.act_fn = many.Linear(mlp.linear_fc1, Activation.GELU_TANH), nn.Identity()
    elif hasattr(mlp, "gate_proj") and isinstance(mlp.act_fn, SILU):
        return SwiGLU(many.Linear(mlp.gate_proj, Activation.SILU), mlp.up_proj, mlp.down_proj)
    return mlp
