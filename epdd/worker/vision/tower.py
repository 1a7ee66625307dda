"""A vision tower with its slow parts replaced, for any backend.

transformers' tower runs as loaded but for three things: the patch convolution is one product on bytes, attention goes
image by image without masks or copies, and what follows from the grid alone is computed once a grid.  `backends`
compute the products.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from epdd.families import ModelInfo
from epdd.worker.vision import preprocess
from epdd.worker.vision.decode_image import Pixels
from epdd.worker.vision.grids import Grid, Segments, tables


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
    """Replaces the rotary embedding: its tables come with the grid."""

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
        query, key = rotate(joint[:, :2], *position_embeddings).unbind(1)
        return self.proj(self.attend(query, key, joint[:, 2], cu_seqlens).reshape(n, width))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments) -> torch.Tensor:
        """[n, heads, head_dim] of each to the same shape; a backend may put another kernel here.

        Neighbours of equal length are one batch: windows, and small images of one size.
        """
        pieces = []
        for start, length, count in segments.runs:
            q, k, v = (x.narrow(0, start, length * count).unflatten(0, (count, length)).transpose(1, 2)
                       for x in (query, key, value))
            made = functional.scaled_dot_product_attention(q, k, v, scale=self.scaling)
            pieces.append(made.transpose(1, 2).flatten(0, 1))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def rotate(joint: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions onto queries and keys [n, 2, heads, head_dim], in float32 inside, as transformers does."""
    half = cos.shape[-1] // 2
    rows = joint.float()
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = rows * cos
    turned[..., :half].addcmul_(rows[..., half:], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(rows[..., :half], sin[..., half:])
    return turned.to(joint.dtype)


class Tower:
    """Patches and grids in, planes out: embeddings, then deepstack features, each [rows, hidden]."""

    def __init__(self, load: Callable[[], Any], info: ModelInfo) -> None:
        """`load` gives the module as transformers loads it, each time anew."""
        self.info = info
        self._load = load
        self.reload()

    def reload(self) -> None:
        """Begin again with the weights as loaded, whatever a backend has made of them."""
        self.module: Any = None         # the old ones go first
        self._tables: Any = None
        self.module = module = self._load()
        weight = module.patch_embed.proj.weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self.parameters: int = sum(p.numel() for p in module.parameters())
        module.patch_embed = FoldedPatchEmbed(module.patch_embed.proj, self.info.mean, self.info.std)
        for block in module.blocks:
            block.attn = ImageAttention(block.attn)
        self._tables = tables(module)
        module.rotary_pos_emb = GivenRotary()

    def prepare(self, pixels: Pixels, grid: Grid) -> NDArray[np.uint8]:
        """What `__call__` takes of one image, from its upright pixels [height, width, 3]."""
        return preprocess.patches(pixels, self.info, grid)

    def side(self, patches: int) -> int:
        """Of a square grid of about that many patches, and no more than the largest image has."""
        wanted = min(patches, self.info.rows_max * self.info.merge ** 2)
        return max(1, math.isqrt(wanted) // self.info.merge) * self.info.merge

    def blank(self, patches: int) -> tuple[NDArray[np.uint8], Grid]:
        """What `__call__` takes of a black square of about that many patches."""
        side = self.side(patches)
        return np.zeros((side * side, 3 * self.info.patch ** 2), np.uint8), (1, side, side)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def __call__(self, patches: torch.Tensor, grids: list[Grid]) -> list[torch.Tensor]:
        """[n, 3 * patch * patch] bytes of all images, one after another, on the tower's device."""
        out = self.module(patches, return_dict=True, **self._tables(tuple(grids)))
        return [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]

    def sample(self) -> "Tower":
        """A copy with one block and no mergers, for trials: each block costs what any other does."""
        other = copy.copy(self)
        module = other.module = copy.copy(self.module)
        module._modules = dict(module._modules)
        module.blocks = module.blocks[:1]
        module.merger = nn.Identity()
        module.deepstack_visual_indexes = []
        module.deepstack_merger_list = nn.ModuleList()
        other.module = copy.deepcopy(module)
        return other
