"""The backend of CPUs with AMX, for float32: products and attention by kernels of epdd's own."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from epdd.worker.kernels import gemm_bf16x3, onednn
from epdd.worker.kernels.gemm_bf16x3 import Activation
from epdd.worker.vision import segment_attention
from epdd.worker.vision.backends import Run
from epdd.worker.vision.backends.cpu import Plain, end_with_activation
from epdd.worker.vision.tower import Tower


class Amx(Plain):
    """All products as sums of bfloat16 products, as near as float32's own; weights stay as they lie."""

    name = "amx"

    def missing(self, tower: Tower) -> str:
        if tower.device.type != "cpu":
            return "for CPUs only"
        if tower.dtype is not torch.float32:
            return f"not for {str(tower.dtype).removeprefix('torch.')}"
        return gemm_bf16x3.missing()

    def prepare(self, tower: Tower) -> Run:
        segment_attention.attend_in(tower.module)
        for block in tower.module.blocks:
            block.mlp = end_with_activation(block.mlp, nn.Linear,
                                            partial(gemm_bf16x3.ManyRowsLinear, activation=Activation.GELU_TANH),
                                            partial(gemm_bf16x3.ManyRowsLinear, activation=Activation.SILU))
        if not onednn.replace_linears(tower.module, gemm_bf16x3.ManyRowsLinear):
            raise RuntimeError("its products are not torch's")
        return tower
