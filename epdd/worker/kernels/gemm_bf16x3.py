"""Products of many float32 rows by AMX: up to twice as fast as torch.

AMX multiplies bfloat16 only.  A float32 is the sum of three of them, exactly, and six of their nine products hold the
float32 product but for 2^-24 (Henry, Tang and Heinecke, arXiv 1904.06376), so results are as near as torch's own.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch
from torch import nn

from epdd.worker.kernels import native
from epdd.worker.kernels.native import Matrix


class Activation(IntEnum):
    """What may end a product; the numbers are library.h's."""

    NONE, GELU_TANH, SILU = range(3)


def missing() -> str:
    """What this machine lacks; empty: nothing."""
    library = native.library()
    if library is None:
        return "no compiled kernels"
    return "" if library.epdd_has_gemm() else "this CPU has no AMX"


class ManyRowsLinear(nn.Module):  # type: ignore[misc]
    """Replaces a float32 nn.Linear; an activation may end its product.  The weights stay as they lie."""

    def __init__(self, linear: nn.Linear, activation: Activation = Activation.NONE) -> None:
        """Raises RuntimeError on other weights."""
        super().__init__()
        weight = linear.weight
        if weight.device.type != "cpu" or weight.dtype is not torch.float32 or not weight.is_contiguous():
            raise RuntimeError("not for such weights")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.activation = activation
        self._matrix = Matrix.of(linear)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [..., in_features] to [..., out_features].  Raises MemoryError, RuntimeError on other rows."""
        if rows.dtype is not torch.float32 or rows.shape[-1] != self.in_features:
            raise RuntimeError(f"rows {tuple(rows.shape)} of {rows.dtype} for {self.in_features} inputs of float32")
        rows = rows.contiguous()
        out = torch.empty(*rows.shape[:-1], self.out_features)
        library = native.library()
        assert library is not None
        count = rows.numel() // self.in_features
        if count and not library.epdd_gemm(ctypes.byref(self._matrix), rows.data_ptr(), out.data_ptr(), count,
                                           self.activation):
            raise MemoryError(f"no memory for a product of {tuple(rows.shape)}")
        return out
