"""The backends of CPUs: products by torch, by oneDNN on prepacked weights, in int8, by Intel's extension."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from epdd.worker.kernels import gemm_bf16x3, onednn
from epdd.worker.vision import segment_attention
from epdd.worker.vision.backends import Planes, Run, cosine, relative_error
from epdd.worker.vision.tower import Tower

# Of the worst plane.  Float32 differs by the order of sums alone; bfloat16 rounds each of some 200 steps to 8 bits.
ERROR_MAX = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
COSINE_MIN = 0.99       # int8: below it answers change visibly
INT8_MAX = 127.0
GELU_TANH, SILU = type(ACT2FN["gelu_pytorch_tanh"]), type(ACT2FN["silu"])


class Plain:
    """torch's own products on the weights as loaded: the reference for the others."""

    name = "torch"

    def missing(self, tower: Tower) -> str:
        return ""

    def prepare(self, tower: Tower) -> Run:
        return tower

    def refusal(self, found: Planes, wanted: Planes) -> str:
        error, limit = relative_error(found, wanted), ERROR_MAX[wanted[0].dtype]
        return "" if error <= limit else f"off by {error:.1e} of the embedding, {limit:.0e} allowed"


class Prepacked(Plain):
    """Weights in oneDNN's own layout, activations computed where the product leaves its result."""

    name = "prepacked"

    def missing(self, tower: Tower) -> str:
        return "" if tower.device.type == "cpu" else "for CPUs only"

    def prepare(self, tower: Tower) -> Run:
        if not onednn.pack(tower.module):
            raise RuntimeError("this torch has no prepacked products")
        for block in tower.module.blocks:
            block.mlp = end_with_activation(block.mlp, onednn.PackedLinear,
                                            partial(_ended, activation="gelu", algorithm="tanh"),
                                            partial(_ended, activation="swish"))
        return tower


class Int8(Prepacked):
    """Products in int8, rows quantised as they come; the patch embedding, whose rows are the pixels, as Prepacked.

    Attention is float32's, by AMX if the CPU has it.
    """

    name = "int8"

    def prepare(self, tower: Tower) -> Run:
        embed = tower.module.patch_embed
        onednn.pack(embed)
        if tower.dtype is torch.float32 and not gemm_bf16x3.missing():
            segment_attention.attend_in(tower.module)
        # Names, not layers: each one's old weights must be freed before the next ones are made.
        places = [(parent, name) for parent in tower.module.modules() for name, child in parent.named_children()
                  if isinstance(child, nn.Linear) and parent is not embed]
        for parent, name in places:
            setattr(parent, name, Int8Linear(getattr(parent, name)))
        return tower

    def refusal(self, found: Planes, wanted: Planes) -> str:
        found_cosine = cosine(found, wanted)
        return "" if found_cosine >= COSINE_MIN else f"cosine {found_cosine:.4f}, at least {COSINE_MIN} needed"


class Ipex(Plain):
    """intel-extension-for-pytorch, if it is installed with the torch it was built for."""

    name = "ipex"
    _package = "intel_extension_for_pytorch"

    def missing(self, tower: Tower) -> str:
        try:
            version = metadata.version(self._package)
        except metadata.PackageNotFoundError:
            return "not installed"
        # Its import with another torch ends in an error, and would end the process if that error were not a bug.
        if version.split(".")[:2] != torch.__version__.split(".")[:2]:
            return f"version {version} does not fit torch {torch.__version__}"
        return "" if tower.device.type == "cpu" else "for CPUs only"

    def prepare(self, tower: Tower) -> Run:
        extension: Any = importlib.import_module(self._package)
        tower.module = extension.optimize(tower.module, dtype=tower.dtype, inplace=True)
        return tower


class Int8Linear(nn.Module):  # type: ignore[misc]
    """Replaces an nn.Linear: int8 weights with a scale a column, int8 rows with a scale each.

    A scale a row, where torch's own dynamic quantisation has one for all rows, halves the error, and rows that stand
    out, which vision towers have, harm no others.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        self._scales = (weight.abs().amax(1) / INT8_MAX).clamp_min_(torch.finfo(torch.float32).tiny)
        self._weight = (weight / self._scales[:, None]).round_().to(torch.int8)
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        flat = rows.flatten(0, -2).float()
        low, high = torch.aminmax(flat, dim=1, keepdim=True)
        scales = torch.maximum(high, -low).div_(INT8_MAX).clamp_min_(torch.finfo(torch.float32).tiny)
        whole = torch._int_mm((flat / scales).round_().to(torch.int8), self._weight.t())
        made = whole.float().mul_(self._scales).mul_(scales)
        if self._bias is not None:
            made.add_(self._bias)
        return made.to(rows.dtype).view(*rows.shape[:-1], -1)


class SwiGLU(nn.Module):  # type: ignore[misc]
    """Qwen2.5-VL's feed-forward part, the gate's SiLU ending its product."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        """`gate` ends with SiLU."""
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same shape."""
        return self.down(self.gate(rows).mul_(self.up(rows)))


def end_with_activation(mlp: Any, kind: type[nn.Module], gelu: Callable[[Any], nn.Module],
                        silu: Callable[[Any], nn.Module]) -> nn.Module:
    """A block's feed-forward part with its activation inside a product of `kind`, where it is GELU by tanh or SiLU.

    `gelu` and `silu` make a product that ends with it of one that does not.
    """
    if isinstance(getattr(mlp, "linear_fc1", None), kind) and isinstance(mlp.act_fn, GELU_TANH):
        mlp.linear_fc1, mlp.act_fn = gelu(mlp.linear_fc1), nn.Identity()
    elif isinstance(getattr(mlp, "gate_proj", None), kind) and isinstance(mlp.act_fn, SILU):
        return SwiGLU(silu(mlp.gate_proj), mlp.up_proj, mlp.down_proj)
    return mlp


def _ended(packed: onednn.PackedLinear, activation: str, algorithm: str = "") -> onednn.PackedLinear:
    """The same, with an activation computed while the result is in the cache."""
    packed.activation, packed.algorithm = activation, algorithm
    return packed
