from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm

from epdd.worker.kernels import norm


class OnePlusRMSNorm(Qwen2RMSNorm):
    """Scales by one plus the weight, as some families do."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) + rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_exchanged_for_the_same_in_one_kernel(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.ModuleDict({"a": Qwen2RMSNorm(48, eps=1e-5), "b": nn.Sequential(Qwen3VLTextRMSNorm(16)),
                           "other": OnePlusRMSNorm(48), "norm": nn.LayerNorm(48)})
    for parameter in layer.parameters():
        parameter.data.uniform_(0.5, 1.5)
    layer = layer.to(dtype)
    rows = torch.randn(3, 5, 48, dtype=dtype)
    wanted = layer["a"](rows)
    assert norm.fuse(layer) == 2
    assert isinstance(layer["a"], norm.FusedNorm) and isinstance(layer["b"][0], norm.FusedNorm)
    assert isinstance(layer["other"], OnePlusRMSNorm) and isinstance(layer["norm"], nn.LayerNorm)
    torch.testing.assert_close(layer["a"](rows), wanted, rtol=norm.TOLERANCE[dtype], atol=norm.TOLERANCE[dtype])
