"""A vision tower with the parts exchanged that cost more than they must, whoever computes its products.

transformers' tower runs as loaded but for three things: the patch convolution is one product on bytes, attention goes
image by image without masks or copies, and what follows from the grid alone is computed once a grid.  How the products
are computed is a matter of `backends`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from epdd.families import Family
from epdd.worker.grids import Grid, Segments, Tables, tables


class FoldedPatchEmbed(nn.Module):  # type: ignore[misc]
    """The tower's patch convolution as one product on bytes.

    Rescaling, normalisation and the second frame of a still (a copy of the first) are folded into weight
    and bias, in float64.  Not for video, whose frames differ.
    """

    def __init__(self, convolution: nn.Conv3d, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        weight = convolution.weight.detach().double().sum(2)            # [out, channels, patch, patch]
        mean64, std64 = (torch.tensor(x, dtype=torch.float64, device=weight.device) for x in (mean, std))
        shift = -(weight.sum((2, 3)) * (mean64 / std64)).sum(1)
        if convolution.bias is not None:
            shift = shift + convolution.bias.detach().double()
        scaled = weight / (255.0 * std64)[None, :, None, None]
        kind = convolution.weight.dtype
        self.product = nn.Linear(scaled[0].numel(), len(scaled), device=weight.device, dtype=kind).requires_grad_(False)
        self.product.weight.copy_(scaled.flatten(1))
        self.product.bias.copy_(shift)
        self._kind = kind

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[n, channels * patch * patch] bytes to [n, out]."""
        return self.product(patches.to(self._kind))


class GivenRotary(nn.Module):  # type: ignore[misc]
    """Stands where the rotary embedding was: its tables come with the grid."""

    def forward(self, rows: torch.Tensor, position_ids: tuple[torch.Tensor, torch.Tensor]) -> Any:
        """(cos, sin), each [n, head_dim]: what `Tables` passes in the place of position ids."""
        return position_ids


class ImageAttention(nn.Module):  # type: ignore[misc]
    """Attention within each image or window; takes over the projections of the module it stands for."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.proj = attention.qkv, attention.proj
        self.heads: int = attention.num_heads
        self.scaling: float = attention.scaling

    def forward(self, hidden_states: torch.Tensor, cu_seqlens: Segments,
                position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any) -> torch.Tensor:
        """[n, width] to [n, width].  `cu_seqlens` keeps the name that the tower's blocks call it by."""
        n, width = hidden_states.shape
        joint = self.qkv(hidden_states).view(n, 3, self.heads, -1)
        rotate(joint[:, :2], *position_embeddings)
        return self.proj(self.attend(*joint.unbind(1), cu_seqlens).reshape(n, width))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments) -> torch.Tensor:
        """[n, heads, head_dim] of each to the same shape; a backend may put another kernel here.

        Neighbours of equal length are one batch: windows, and small images of one size.
        """
        pieces = []
        for start, length, count in segments.runs:
            parts = (x.narrow(0, start, length * count).unflatten(0, (count, length)).transpose(1, 2)
                     for x in (query, key, value))
            pieces.append(functional.scaled_dot_product_attention(*parts, scale=self.scaling)
                          .transpose(1, 2).flatten(0, 1))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def rotate(joint: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotary positions onto queries and keys [n, 2, heads, head_dim], in place and in float32, as transformers does."""
    half = cos.shape[-1] // 2
    cos, sin = cos[:, None, None, :half], sin[:, None, None, :half]     # both halves of a table are the same
    first, second = (x.float() for x in joint.split(half, -1))
    turned = (first * cos).addcmul_(second, sin, value=-1)
    joint[..., half:] = (second * cos).addcmul_(first, sin)
    joint[..., :half] = turned


class Tower:
    """Patches and grids in, planes out: embeddings, then deepstack features, each [rows, hidden]."""

    def __init__(self, module: Any, family: Family) -> None:
        """Takes the module as loaded, and changes it."""
        self.family, self.module = family, module
        weight = module.patch_embed.proj.weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self.parameters: int = sum(p.numel() for p in module.parameters())
        module.patch_embed = FoldedPatchEmbed(module.patch_embed.proj, family.mean, family.std)
        for block in module.blocks:
            block.attn = ImageAttention(block.attn)
        self._tables = tables(module)
        module.rotary_pos_emb = GivenRotary()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def __call__(self, patches: torch.Tensor, grids: list[Grid]) -> list[torch.Tensor]:
        """[n, 3 * patch * patch] bytes of all images, one after another, on the tower's device."""
        out = self.module(patches, return_dict=True, **self._tables(tuple(grids)))
        return [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]

    def sample(self, blocks: int) -> "Tower":
        """A copy with so many blocks, for trials: each costs what any other does."""
        other = copy.copy(self)
        other.module = copy.copy(self.module)
        other.module._modules = dict(self.module._modules)
        other.module.blocks = self.module.blocks[:blocks]
        other.module = copy.deepcopy(other.module)
        return other
