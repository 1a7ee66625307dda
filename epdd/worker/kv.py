"""The KV cache: one fixed pool a layer, a contiguous extent of it a sequence.

Owns where a sequence's keys and values lie; how many tokens each may hold is the scheduler's decision, and
any set of extents that fits in sum can be placed: where holes are too small, everything moves up.
"""

from __future__ import annotations

from typing import Any

import torch

from epdd.extents import Extents
from epdd.worker.attention import Plan
from epdd.worker.scheduler import KV_UNIT


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """KV memory of one token over all layers, from a text model's config."""
    layers, heads, dim = _shape(config)
    return 2 * layers * heads * dim * int(dtype.itemsize)


class Pool:
    """Keys and values [kv heads, tokens, head size] of each layer; what the text model takes as its `cache`."""

    def __init__(self, config: Any, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates and touches all pages, so that no page fault is left for serving."""
        layers, heads, dim = _shape(config)
        self._extents = Extents(tokens, KV_UNIT)
        self._held: dict[str, tuple[int, int]] = {}     # owner: offset, size
        shape = (heads, self._extents.size, dim)
        # full() writes where zeros() would map pages on first use.
        self._keys, self._values = ([torch.full(shape, 0.0, dtype=dtype, device=device) for _ in range(layers)]
                                    for _ in range(2))

    def offset(self, owner: str) -> int:
        return self._held[owner][0]

    def hold(self, owner: str, size: int) -> None:
        """Give `owner` an extent of at least `size` tokens; what it held keeps its content."""
        offset, had = self._held.get(owner, (0, 0))
        if had >= size:
            return
        if had and self._extents.grow(offset, had, size):
            self._held[owner] = offset, size
            return
        target = self._extents.take(size)
        if target is None:
            self._spread(owner, size)
            return
        if had:
            self._move(offset, target, had)
            self._extents.release(offset, had)
        self._held[owner] = target, size

    def release(self, owner: str) -> None:
        """Take an owner's extent back; one that holds none is ignored."""
        held = self._held.pop(owner, None)
        if held:
            self._extents.release(*held)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int,
               kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by transformers' attention: store a step's rows [1, kv heads, T, dim], return the layer's pool."""
        plan: Plan = kwargs["plan"]
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys.index_copy_(1, plan.slots, key[0])
        values.index_copy_(1, plan.slots, value[0])
        return keys, values

    def _spread(self, owner: str, size: int) -> None:
        """Place all extents anew in their old order, `owner`'s enlarged, free space shared out behind each.

        The gaps let the next growths happen in place, so that the cost of this is spread over many.
        """
        order = sorted(self._held, key=lambda name: self._held[name][0])
        sizes = {name: self._held[name][1] for name in order} | {owner: size}
        self._extents = Extents(self._extents.size, KV_UNIT)
        rounded = {name: self._extents.rounded(wanted) for name, wanted in sizes.items()}
        gap = (self._extents.size - sum(rounded.values())) // len(sizes) // KV_UNIT * KV_UNIT
        moves = []
        for name, wanted in rounded.items():
            offset = self._extents.take(wanted + gap)
            assert offset is not None, "more KV memory reserved than there is"
            if name in self._held:
                moves.append((*self._held[name], offset))
            self._held[name] = offset, sizes[name]
        for name, wanted in rounded.items():
            self._extents.shrink(self._held[name][0], wanted + gap, wanted)
        # Invariant: those that move down go first, in ascending order, then those that move up, in descending
        # order; then no extent is overwritten before it has moved.
        for old, had, new in [m for m in moves if m[2] < m[0]] + [m for m in reversed(moves) if m[2] > m[0]]:
            self._move(old, new, had)

    def _move(self, old: int, new: int, size: int) -> None:
        for pool in (*self._keys, *self._values):
            pool[:, new:new + size] = pool[:, old:old + size].clone()   # the two may overlap


def _shape(config: Any) -> tuple[int, int, int]:
    """Layers, KV heads and head size of a text model's config."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, dim
