"""The KV cache: one fixed pool a layer, one contiguous extent of it a sequence, and what former sequences left there.

Owns where a sequence's keys and values lie.  How many tokens each may have is counted by the scheduler alone; any set
of extents that fits in sum can be placed: if the gaps are too small, the extents move.

Keys and values outside all extents stay readable until an extent needs their place.  A sequence with a known prefix
copies them into its own extent: attention then reads one contiguous slice a sequence, and copying a token's keys and
values is thousands of times cheaper than computing them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from epdd import wire
from epdd.errors import ModelError
from epdd.worker.language.model_runner import LayerMemory
from epdd.worker.language.prefix_cache import PrefixCache
from epdd.worker.language.scheduler import BLOCK_SIZE

FULL_CONTEXTS_MAX = 16      # by default: a tiny model would touch gigabytes it never uses
BYTES_DEFAULT = 1 << 30     # placement names a size; this is for a spec made by hand
TAKEN = np.iinfo(np.int64).max      # in place of the last use of blocks that belong to a sequence


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """KV memory of one token over all layers, from a text model's config."""
    layers, heads, dim = sizes(config)
    return 2 * layers * heads * dim * int(dtype.itemsize)


def pick_dtype(spec: wire.WorkerSpec, weights: torch.dtype) -> torch.dtype:
    """The type of keys and values.  On a GPU always the weights' type: its kernels take no other."""
    if spec.kv_dtype == "auto" or spec.device != "cpu":
        return weights
    return cast(torch.dtype, getattr(torch, spec.kv_dtype))


def tokens(spec: wire.WorkerSpec, config: Any, dtype: torch.dtype, context: int) -> int:
    """The cache's size in tokens: as set, or what fits the bytes, up to a number of requests of full length.

    Raises ModelError if not one block fits.
    """
    each = bytes_per_token(config, dtype)
    count = spec.kv_tokens or min((spec.kv_bytes or BYTES_DEFAULT) // each, FULL_CONTEXTS_MAX * (context + BLOCK_SIZE))
    count = min(count, spec.max_sequences * (context + BLOCK_SIZE)) // BLOCK_SIZE * BLOCK_SIZE
    if count < BLOCK_SIZE:
        raise ModelError(f"KV cache of {count} tokens is too small; {BLOCK_SIZE} tokens take {BLOCK_SIZE * each} bytes")
    return count


class Step:
    """The pool as transformers' cache for one step."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], slots: torch.Tensor) -> None:
        self._keys, self._values, self._slots = keys, values, slots

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int,
               **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by transformers' attention: store rows [1, kv heads, T, dim], return the layer's pool."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys.index_copy_(1, self._slots, key[0].to(keys.dtype))
        values.index_copy_(1, self._slots, value[0].to(values.dtype))
        return keys, values


class KVPool(LayerMemory):
    """Keys and values [kv heads, tokens, head size] of each layer.

    The engine calls what `LayerMemory` has; the model runner `reserve`, `offset`, `layer` and `at`.
    """

    def __init__(self, config: Any, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates and touches all pages, so that no page fault is left for serving."""
        layers, heads, dim = sizes(config)
        blocks = tokens // BLOCK_SIZE
        self._extents: dict[str, tuple[int, int]] = {}     # owner: first block, number of blocks
        self._taken = np.zeros(blocks, bool)            # blocks in extents
        self._prefixes = PrefixCache(blocks)
        shape = (heads, blocks * BLOCK_SIZE, dim)
        # full() writes where zeros() would map pages on first use.
        self._keys, self._values = ([torch.full(shape, 0.0, dtype=dtype, device=device) for _ in range(layers)]
                                    for _ in range(2))

    @property
    def cached(self) -> int:
        """Tokens of memory outside all extents whose content is known."""
        return int(np.count_nonzero(self._prefixes.used[~self._taken])) * BLOCK_SIZE

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values; they never move."""
        return self._keys[index], self._values[index]

    def offset(self, owner: str) -> int:
        """The token where its extent begins."""
        return self._extents[owner][0] * BLOCK_SIZE

    def begin(self, owner: str, size: int, items: Sequence[int]) -> int:
        """Give a new owner an extent of at least `size` tokens; how many of `items`, at most `size`, are in it.

        Those are the longest known prefix, copied.
        """
        block_ids, count = self._prefixes.find(items)
        if not self.reserve(owner, size):
            block_ids, count = self._prefixes.find(items)
        if count:
            # The extent may overlap the blocks just found: nothing has been written there yet.
            self._copy(block_ids, count, self.offset(owner))
        return count

    def reserve(self, owner: str, size: int) -> bool:
        """Give `owner` an extent of at least `size` tokens; the content of its present one is kept.

        Returns whether all others stayed where they were.
        """
        first, had = self._extents.get(owner, (0, 0))
        count = -(-size // BLOCK_SIZE)
        if had >= count:
            return True
        if had and first + count <= len(self._taken) and not self._taken[first + had:first + count].any():
            self._take(owner, first, count)
            return True
        target = self._window(count)
        if target is None:
            self._compact(owner, count)
            return False
        self._take(owner, target, count)
        if had:
            self._prefixes.move([(first, target, had)])
            self._move(first, target, had)
            self._taken[first:first + had] = False
        return True

    def share(self, owner: str, items: Sequence[int]) -> None:
        """The owner's extent begins with `items`: from now on others may begin with them."""
        if owner in self._extents:
            self._prefixes.add(items, self._extents[owner][0])

    def release(self, owner: str) -> None:
        """Take an owner's extent back; an owner without one is ignored."""
        first, count = self._extents.pop(owner, (0, 0))
        self._taken[first:first + count] = False

    def forget(self) -> None:
        """Forget all known content."""
        self._prefixes.drop(range(len(self._taken)))

    def at(self, slots: torch.Tensor) -> Step:
        """The text model's cache for a step whose rows go to these tokens of the pool, int64 [T]."""
        return Step(self._keys, self._values, slots)

    def _take(self, owner: str, first: int, count: int) -> None:
        """Make these blocks the owner's; the known content of those that were free is forgotten."""
        block_ids = np.arange(first, first + count)
        self._prefixes.drop(block_ids[~self._taken[block_ids]].tolist())
        self._taken[block_ids] = True
        self._extents[owner] = first, count

    def _window(self, count: int) -> int | None:
        """Start of the run of `count` free blocks whose most recent use is oldest (LRU); None: there is no such run."""
        latest = np.where(self._taken, TAKEN, self._prefixes.used)
        width = 1
        while width < count:        # each is the maximum over `width` blocks from there on
            step = min(width, count - width)
            latest = np.maximum(latest[:-step], latest[step:])
            width += step
        return int(latest.argmin()) if len(latest) and latest.min() < TAKEN else None

    def _compact(self, owner: str, count: int) -> None:
        """Place all extents anew in their old order, `owner`'s enlarged, with an equal share of free space behind each.

        Into these gaps extents grow in place, so this is needed once for many growths.
        """
        old = dict(self._extents)
        sizes = {name: old[name][1] for name in sorted(old, key=lambda name: old[name][0])} | {owner: count}
        gap = (len(self._taken) - sum(sizes.values())) // len(sizes)
        assert gap >= 0, "more KV memory reserved than there is"
        first = 0
        for name, size in sizes.items():
            self._take(name, first, size)
            first += size + gap
        moves = [(*old[name], self._extents[name][0]) for name in sizes if name in old]
        self._prefixes.move([(before, after, had) for before, had, after in moves])
        self._taken[:] = False
        for start, size in self._extents.values():
            self._taken[start:start + size] = True
        # Invariant: those that move down go first, in ascending order, then those that move up, in descending
        # order; then no extent is overwritten before it has moved.
        for before, had, after in [m for m in moves if m[2] < m[0]] + [m for m in reversed(moves) if m[2] > m[0]]:
            self._move(before, after, had)

    def _move(self, old: int, new: int, count: int) -> None:
        source, target = (slice(first * BLOCK_SIZE, (first + count) * BLOCK_SIZE) for first in (old, new))
        for pool in (*self._keys, *self._values):
            pool[:, target] = pool[:, source].clone()   # the two may overlap

    def _copy(self, block_ids: Sequence[int], count: int, offset: int) -> None:
        """Copy the first `count` tokens of these blocks to `offset`."""
        runs: list[tuple[int, int]] = []        # first token and tokens of neighbouring blocks
        for start, block_id in zip(range(0, count, BLOCK_SIZE), block_ids):
            rows = min(BLOCK_SIZE, count - start)
            if runs and sum(runs[-1]) == block_id * BLOCK_SIZE:
                runs[-1] = runs[-1][0], runs[-1][1] + rows
            else:
                runs.append((block_id * BLOCK_SIZE, rows))
        overlap = any(first < offset + count and offset < first + rows for first, rows in runs)
        for pool in (*self._keys, *self._values):
            parts = [pool[:, first:first + rows] for first, rows in runs]
            if overlap:     # a temporary copy costs several times as much
                parts = [part.clone() for part in parts]
            at = offset
            for part in parts:
                pool[:, at:at + part.shape[1]] = part
                at += part.shape[1]


def sizes(config: Any) -> tuple[int, int, int]:
    """Layers, KV heads and head size of a text model's config."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, dim
