"""Attention over packed batches: [1, T] holds chunks and decode tokens of many sequences, one after another.

Registered with transformers, whose text models call it unmodified.  Reads keys and values in place from the
KV pool that `kv_cache.Step.update` returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from epdd.worker.kernels import native

NAME = "epdd"
ROWS_MAX = 256      # of a piece: torch also computes masked scores, so pieces of 512 rows take 1.3 times as long


@dataclass(frozen=True)
class SequenceRows:
    """Rows of a batch that belong to one sequence, one after another."""

    row: int                    # first row of the batch
    count: int                  # rows
    offset: int                 # where the sequence's extent of the pool begins
    length: int                 # its tokens, these rows included
    mask: torch.Tensor | None   # [count, length], true where a row may look; None: none needed


@dataclass(frozen=True)
class AttentionPlan:
    """A step's layout: passed through the model to `kv_cache.Step.update` and `attend`."""

    pieces: list[SequenceRows]
    slots: torch.Tensor         # [T], where each row's key and value go in the pool
    rows: native.RowsTable | None    # the same row by row for the compiled kernels; None: not for them


def plan(chunks: list[tuple[int, int, int]], device: torch.device) -> AttentionPlan:
    """Lay out (count, extent offset, tokens computed before) of each sequence, in batch order."""
    pieces: list[SequenceRows] = []
    starts: list[int] = []
    lengths: list[int] = []
    row = 0
    for count, offset, past in chunks:
        for begin in range(0, count, ROWS_MAX):
            rows, before = min(ROWS_MAX, count - begin), past + begin
            mask = None
            if rows > 1 and before:
                mask = torch.ones(rows, before + rows, dtype=torch.bool, device=device).tril_(before)
            pieces.append(SequenceRows(row + begin, rows, offset, before + rows, mask))
        starts += [offset] * count
        lengths += range(past + 1, past + count + 1)
        row += count
    slots = [start + length - 1 for start, length in zip(starts, lengths)]
    few = native.rows(slots, starts, lengths) if device.type == "cpu" else None
    return AttentionPlan(pieces, torch.tensor(slots, dtype=torch.long, device=device), few)


def attend(module: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
           attention_mask: None, scaling: float, plan: AttentionPlan, **_: Any) -> tuple[torch.Tensor, None]:
    """Rows [1, heads, T, dim] against the pool [kv heads, tokens, dim]; gives [1, T, heads, dim]."""
    _, heads, rows, dim = query.shape
    kv_heads = keys.shape[0]
    out = query.new_empty(rows, heads, dim)
    for piece in plan.pieces:
        # The pool may hold another type than the model computes in; to() copies only then.
        k = keys[None, :, piece.offset:piece.offset + piece.length].to(query.dtype)
        v = values[None, :, piece.offset:piece.offset + piece.length].to(query.dtype)
        if piece.count == 1:
            # The heads of a group share keys: as rows of one query they need no copies of them.
            q = query[:, :, piece.row].reshape(1, kv_heads, heads // kv_heads, dim)
            out[piece.row] = scaled_dot_product_attention(q, k, v, scale=scaling).reshape(heads, dim)
        else:
            q = query[:, :, piece.row:piece.row + piece.count]
            found = scaled_dot_product_attention(q, k, v, attn_mask=piece.mask, is_causal=piece.mask is None,
                                                 scale=scaling, enable_gqa=heads != kv_heads)
            out[piece.row:piece.row + piece.count] = found[0].transpose(0, 1)
    return out[None], None


AttentionInterface.register(NAME, attend)
