"""RMS norms in one kernel each: transformers' take six, and a decode step has a hundred of them."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.nn.functional import rms_norm

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}    # one or two of the last digit


class FusedNorm(nn.Module):  # type: ignore[misc]
    """Replaces a model's RMS norm; same values up to rounding."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., width], each row scaled to a mean square of one, times the weight."""
        return rms_norm(rows, self.weight.shape, self.weight, self.variance_epsilon)


def fuse(module: nn.Module) -> int:
    """Fuse the RMS norms under `module` whose values stay the same; returns how many."""
    fused = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon") and _same(child):
                setattr(parent, name, FusedNorm(child))
                fused += 1
    return fused


def _same(norm: nn.Module) -> bool:
    """Some families scale by one plus the weight, under the same name."""
    width, dtype = norm.weight.shape[0], norm.weight.dtype
    rows = torch.linspace(-2, 3, 3 * width, dtype=torch.float32, device=norm.weight.device).to(dtype).view(3, width)
    with torch.inference_mode():
        found, wanted = FusedNorm(norm)(rows).float(), norm(rows).float()
    return bool(torch.allclose(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]))
