"""Attention of packed batches by the flash kernel that torch ships, for bfloat16 and float16 on NVIDIA GPUs.

The kernel takes all sequences of a batch at once.  A sequence's keys and values are one extent of the KV pool, so it
needs no page table: in place of cumulative lengths the kernel gets each extent's beginning, and separately how many
tokens count.  (With page tables it wants pages of 256 tokens, older versions have none at all, and newer ones can lose
rows where it splits the keys: pytorch issue 194167.)

Decode rows and chunks go separately: only where each sequence has one row does the kernel put the heads that share
keys side by side and split long sequences over the card.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from epdd.worker.language import attention

log = logging.getLogger(__name__)

NAME = "epdd-packed"       # a name with "flash" in it is looked for among transformers' own
# For values near 1: bfloat16 has three digits, and two orders of summation differ by one or two in the last.
TOLERANCE = 2e-2


@dataclass(frozen=True)
class FlashCall:
    """Neighbouring rows of a batch that one call of the kernel takes."""

    row: int                    # the first
    rows: int
    firsts: torch.Tensor        # int32 [sequences + 1]: each sequence's first row, counted from `row`; then `rows`
    offsets: torch.Tensor       # int32 [sequences + 1]: where each one's extent begins; the last has no effect
    lengths: torch.Tensor       # int32 [sequences]: its tokens, these rows included
    chunk_max: int              # no sequence has more rows here; 1: decode rows
    length_max: int             # no sequence is longer


# Query rows [rows, heads, dim] against keys and values [tokens, kv heads, dim]; the last of a sequence's rows sees all
# of its tokens, each one before it one less.
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, FlashCall, float], torch.Tensor]


@dataclass(frozen=True)
class FlashPlan:
    """A step's layout: passed through the model to the pool and to `attend`."""

    slots: torch.Tensor         # int64 [T], where each row's key and value go in the pool
    parts: tuple[FlashCall, ...]
    kernel: Kernel


def plan(layout: list[tuple[int, int, int]], kernel: Kernel, put: Callable[[torch.Tensor], torch.Tensor]) -> FlashPlan:
    """Lay out (count, extent offset, tokens computed before) of each sequence, in batch order.

    `put` brings a tensor to the device.
    """
    slots = torch.cat([torch.arange(offset + past, offset + past + count) for count, offset, past in layout])
    single = next((i for i, (count, _, _) in enumerate(layout) if count > 1), len(layout))
    parts, row = [], 0
    for group in (layout[:single], layout[single:]):
        if group:
            firsts = [0]
            for count, _, _ in group:
                firsts.append(firsts[-1] + count)
            lengths = [past + count for count, _, past in group]
            numbers = put(torch.tensor(firsts + [offset for _, offset, _ in group] + [0] + lengths, dtype=torch.int32))
            firsts_, offsets, lengths_ = numbers.split((len(group) + 1, len(group) + 1, len(group)))
            parts.append(FlashCall(row, firsts[-1], firsts_, offsets, lengths_, max(count for count, _, _ in group),
                                   max(lengths)))
            row += firsts[-1]
    return FlashPlan(put(slots), tuple(parts), kernel)


def attend(module: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention_mask: None,
           scaling: float, plan: FlashPlan | attention.AttentionPlan, **more: Any) -> tuple[torch.Tensor, None]:
    """Rows [1, heads, T, dim] against the pool [kv heads, tokens, dim]; gives [1, T, heads, dim]."""
    if isinstance(plan, attention.AttentionPlan):
        return attention.attend(module, query, keys, values, attention_mask, scaling, plan, **more)
    rows = query[0].transpose(0, 1)
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    found = [plan.kernel(rows[part.row:part.row + part.rows], keys, values, part, scaling) for part in plan.parts]
    return (found[0] if len(found) == 1 else torch.cat(found))[None], None


AttentionInterface.register(NAME, attend)


def operator(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: FlashCall, scale: float
             ) -> torch.Tensor:
    """The operator under varlen_attn, which takes lengths only from torch 2.12 on, and adds overhead."""
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, keys, values, part.firsts, part.offsets, part.chunk_max, part.length_max, 0.0, part.chunk_max > 1, False,
        scale=scale, seqused_k=part.lengths)[0]
    return out


def public(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: FlashCall, scale: float
           ) -> torch.Tensor:
    """varlen_attn, from torch 2.12 on."""
    from torch.nn.attention.varlen import varlen_attn

    # A window of (-1, 0) is how it spells causal; a single row needs none, and any keeps it from splitting the keys.
    out: torch.Tensor = varlen_attn(
        query, keys, values, part.firsts, part.offsets, part.chunk_max, part.length_max, scale=scale,
        window_size=(-1, 0) if part.chunk_max > 1 else (-1, -1), enable_gqa=True, seqused_k=part.lengths)
    return out


def by_sequence(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: FlashCall,
                scale: float) -> torch.Tensor:
    """The same one sequence after another, on any device: the reference for the kernels."""
    firsts, offsets, lengths = part.firsts.tolist(), part.offsets.tolist(), part.lengths.tolist()
    found = []
    for first, end, offset, length in zip(firsts, firsts[1:], offsets, lengths):
        rows = end - first
        mask = torch.ones(rows, length, dtype=torch.bool, device=query.device).tril_(length - rows)
        q, k, v = (x.transpose(0, 1) for x in (query[first:end], keys[offset:offset + length],
                                               values[offset:offset + length]))
        found.append(scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale,
                                                  enable_gqa=q.shape[0] != k.shape[0])[0].transpose(0, 1))
    return torch.cat(found)


KERNELS: dict[str, Kernel] = {"flash": operator, "varlen_attn": public}


def choose(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device,
           kernels: dict[str, Kernel] = KERNELS) -> tuple[str, Kernel] | None:
    """The first kernel that this torch has, that takes these shapes and types, and that is right on this card."""
    for name, kernel in kernels.items():
        try:
            if _right(kernel, heads, kv_heads, dim, dtype, device):
                return name, kernel
            log.warning("attention kernel %s computes something else on this card: not used", name)
        except (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            log.info("attention kernel %s cannot be used: %s", name, str(error).partition("\n")[0])
    return None


def _right(kernel: Kernel, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether it agrees with `by_sequence` on decode rows and chunks, in extents out of order and with gaps."""
    draw = torch.Generator(device).manual_seed(0)
    tokens = 4096
    keys, values = (torch.randn(kv_heads, tokens, dim, generator=draw, dtype=dtype, device=device).transpose(0, 1)
                    for _ in range(2))
    layouts = [[(1, 3072, 700), (1, 0, 0), (1, 1024, 1999), (1, 128, 63)],
               [(5, 2048, 0), (130, 64, 700), (1, 3200, 333), (64, 1024, 512)]]
    for layout in layouts:
        for part in plan(layout, kernel, lambda tensor: tensor.to(device)).parts:
            rows = torch.randn(part.rows, heads, dim, generator=draw, dtype=dtype, device=device)
            wanted = by_sequence(rows.float(), keys.float(), values.float(), part, dim ** -0.5)
            found = kernel(rows, keys, values, part, dim ** -0.5)
            if not torch.allclose(found.float(), wanted, atol=TOLERANCE, rtol=TOLERANCE):
                return False
    return True
