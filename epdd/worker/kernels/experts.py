"""Mixtures of experts on CPUs, registered with transformers, whose layers choose the experts and call this unmodified.

Few rows go through one compiled call, which reads the weights of the chosen experts once and no others.  More rows go
expert by expert, each expert's rows as one product.  Weights stay as transformers has them, three-dimensional.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

from epdd.worker.kernels import gemm_bf16x3, native
from epdd.worker.kernels.gemm_bf16x3 import Activation
from epdd.worker.kernels.native import MULTIPLE, ROWS_MAX, TYPES, Matrix

NAME = "epdd"


class ExpertWeights(ctypes.Structure):
    """`Experts` as library.h has it."""

    _fields_ = [("count", ctypes.c_long), ("hidden", ctypes.c_long), ("inner", ctypes.c_long),
                ("half_weights", ctypes.c_long), ("gate_up", ctypes.c_void_p), ("down", ctypes.c_void_p)]


def forward(module: Any, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the `chosen` experts [T, k] make of `rows` [T, hidden], added up with `weights` [T, k].

    A number that is no expert's stands for none.
    """
    kernels = native.library()
    if kernels is None or not _takes(module) or rows.dtype != module.down_proj.dtype:
        return type(module).forward.__wrapped__(module, rows, chosen, weights)
    if len(rows) > ROWS_MAX:
        return _many(module, rows, chosen, weights)
    count, hidden, inner = module.down_proj.shape
    experts = ExpertWeights(count, hidden, inner, rows.dtype == torch.bfloat16, module.gate_up_proj.data_ptr(),
                            module.down_proj.data_ptr())
    rows, chosen, weights = rows.contiguous(), chosen.contiguous(), weights.float().contiguous()
    out = torch.empty(len(rows), hidden)
    kernels.epdd_experts(ctypes.byref(experts), chosen.data_ptr(), weights.data_ptr(), len(rows), chosen.shape[1],
                         rows.data_ptr(), out.data_ptr())
    return out.to(rows.dtype)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def error(module: Any) -> float:
    """How far `forward` is from transformers' own, as a share of the largest value, for few rows and for many."""
    count, hidden, _ = module.down_proj.shape
    each, worst = min(2, count), 0.0
    for rows in (3, ROWS_MAX + 1):
        generator = torch.Generator().manual_seed(rows)
        states = torch.randn(rows, hidden, generator=generator).to(module.down_proj.dtype)
        chosen = torch.stack([torch.randperm(count, generator=generator)[:each] for _ in range(rows)])
        weights = torch.rand(rows, each, generator=generator).to(states.dtype)
        found, wanted = (call(module, states, chosen, weights) for call in (forward, type(module).forward.__wrapped__))
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    return worst


def _takes(module: Any) -> bool:
    """Whether the kernels know this kind of experts, in sizes they take."""
    gate_up, down = module.gate_up_proj, module.down_proj
    plain = not (module.has_bias or module.is_transposed) and module.has_gate and module.is_concatenated and \
        not getattr(module, "has_post_expert_norm", False) and isinstance(module.act_fn, (nn.SiLU, type(_silu())))
    return bool(plain and down.dtype in TYPES and gate_up.dtype == down.dtype and gate_up.is_contiguous()
                and down.is_contiguous() and down.shape[1] % MULTIPLE == 0 and down.shape[2] % MULTIPLE == 0)


def _silu() -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN["silu"]


def _many(module: Any, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    order = chosen.flatten().argsort(stable=True)
    of_row, scale = order // chosen.shape[1], weights.flatten()[order].float()[:, None]
    experts = len(module.down_proj)
    out = torch.zeros(rows.shape)
    end = 0
    for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=experts).tolist()[:experts]):
        begin, end = end, end + count
        if count:
            mine = of_row[begin:end]
            gate, up = _product(rows[mine], module.gate_up_proj[expert]).chunk(2, -1)
            made = _product(functional.silu(gate) * up, module.down_proj[expert])
            out.index_add_(0, mine, made.float() * scale[begin:end])
    return out.to(rows.dtype)


def _product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """rows [T, inputs] x matrix [outputs, inputs]^T, in the type of both."""
    kernels = native.library()
    assert kernels is not None
    outputs, inputs = matrix.shape
    out = torch.empty(len(rows), outputs)
    pointers = ctypes.byref(Matrix(matrix.data_ptr(), None, outputs, inputs))
    rows = rows.contiguous()
    if len(rows) <= ROWS_MAX:
        kernels.epdd_linear(pointers, rows.dtype == torch.bfloat16, rows.data_ptr(), out.data_ptr(), len(rows))
        return out.to(rows.dtype)
    if rows.dtype == torch.float32 and not gemm_bf16x3.missing():
        if not kernels.epdd_gemm(pointers, rows.data_ptr(), out.data_ptr(), len(rows), Activation.NONE):
            raise MemoryError(f"no memory for a product of {tuple(rows.shape)}")
        return out
    return functional.linear(rows, matrix)


ExpertsInterface.register(NAME, forward)
