"""The KV cache: one fixed pool a layer, a contiguous extent of it a sequence, and what is kept of former ones.

Owns where a sequence's keys and values lie; how many tokens each may hold is the scheduler's decision, and
any set of extents that fits in sum can be placed: where holes are too small, everything moves up.

Rows outside all extents stay readable until an extent needs their place.  A sequence that begins like a known one
copies those rows into its own extent: attention reads one contiguous slice a sequence, as fast as without, and
copying a token's rows is thousands of times cheaper than computing them.
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
HELD = np.iinfo(np.int64).max       # later than any block was wanted: what is held is never taken


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """KV memory of one token over all layers, from a text model's config."""
    layers, heads, dim = sizes(config)
    return 2 * layers * heads * dim * int(dtype.itemsize)


def pick_dtype(spec: wire.WorkerSpec, weights: torch.dtype) -> torch.dtype:
    """What keys and values are kept in.  On a GPU, whose kernels take no other, always the weights' type."""
    if spec.kv_dtype == "auto" or spec.device != "cpu":
        return weights
    return cast(torch.dtype, getattr(torch, spec.kv_dtype))


def tokens(spec: wire.WorkerSpec, config: Any, dtype: torch.dtype, context: int) -> int:
    """How many to hold: as told, or what the bytes hold, up to a number of requests of full length.

    Raises ModelError where not one unit fits.
    """
    each = bytes_per_token(config, dtype)
    count = spec.kv_tokens or min((spec.kv_bytes or BYTES_DEFAULT) // each, FULL_CONTEXTS_MAX * (context + BLOCK_SIZE))
    count = min(count, spec.max_sequences * (context + BLOCK_SIZE)) // BLOCK_SIZE * BLOCK_SIZE
    if count < BLOCK_SIZE:
        raise ModelError(f"KV cache of {count} tokens is too small; {BLOCK_SIZE} tokens take {BLOCK_SIZE * each} bytes")
    return count


class Step:
    """A step's way into the pool."""

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
    """Keys and values [kv heads, tokens, head size] of each layer."""

    def __init__(self, config: Any, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates and touches all pages, so that no page fault is left for serving."""
        layers, heads, dim = sizes(config)
        units = tokens // BLOCK_SIZE
        self._held: dict[str, tuple[int, int]] = {}     # owner: its first unit, how many
        self._taken = np.zeros(units, bool)             # units of all owners
        self._prefixes = PrefixCache(units)
        shape = (heads, units * BLOCK_SIZE, dim)
        # full() writes where zeros() would map pages on first use.
        self._keys, self._values = ([torch.full(shape, 0.0, dtype=dtype, device=device) for _ in range(layers)]
                                    for _ in range(2))

    @property
    def cached(self) -> int:
        """Tokens of memory that nobody holds and whose content is known."""
        return int(np.count_nonzero(self._prefixes.used[~self._taken])) * BLOCK_SIZE

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, where they lie as long as the pool lives."""
        return self._keys[index], self._values[index]

    def offset(self, owner: str) -> int:
        """The token where its extent begins."""
        return self._held[owner][0] * BLOCK_SIZE

    def begin(self, owner: str, size: int, items: Sequence[int]) -> int:
        """Give a new owner an extent of at least `size` tokens; how many of `items`, at most `size`, are in it.

        Those are the longest known beginning, copied.
        """
        units, count = self._prefixes.find(items)
        if not self.hold(owner, size):
            units, count = self._prefixes.find(items)
        if count:
            # The extent may lie over blocks just found: nothing has been written there yet.
            self._copy(units, count, self.offset(owner))
        return count

    def hold(self, owner: str, size: int) -> bool:
        """Give `owner` an extent of at least `size` tokens; what it held keeps its content.

        Tells whether all others stayed where they were.
        """
        first, had = self._held.get(owner, (0, 0))
        count = -(-size // BLOCK_SIZE)
        if had >= count:
            return True
        if had and first + count <= len(self._taken) and not self._taken[first + had:first + count].any():
            self._take(owner, first, count)
            return True
        target = self._window(count)
        if target is None:
            self._spread(owner, count)
            return False
        self._take(owner, target, count)
        if had:
            self._prefixes.move([(first, target, had)])
            self._move(first, target, had)
            self._taken[first:first + had] = False
        return True

    def share(self, owner: str, items: Sequence[int]) -> None:
        """The owner's extent begins with the rows of `items`: from now on others may begin with them."""
        if owner in self._held:
            self._prefixes.add(items, self._held[owner][0])

    def release(self, owner: str) -> None:
        """Take an owner's extent back; one that holds none is ignored."""
        first, count = self._held.pop(owner, (0, 0))
        self._taken[first:first + count] = False

    def forget(self) -> None:
        """Let go of all that is known."""
        self._prefixes.drop(range(len(self._taken)))

    def at(self, slots: torch.Tensor) -> Step:
        """What the text model takes as its cache for a step whose rows go to these tokens of the pool, int64 [T]."""
        return Step(self._keys, self._values, slots)

    def _take(self, owner: str, first: int, count: int) -> None:
        """Make these units the owner's; what is known of those that were free is forgotten."""
        units = np.arange(first, first + count)
        self._prefixes.drop(units[~self._taken[units]].tolist())
        self._taken[units] = True
        self._held[owner] = first, count

    def _window(self, count: int) -> int | None:
        """The first of `count` units in a row that nobody holds, where the latest want is the longest ago."""
        latest = np.where(self._taken, HELD, self._prefixes.used)
        width = 1
        while width < count:        # each is the maximum over `width` units from there on
            step = min(width, count - width)
            latest = np.maximum(latest[:-step], latest[step:])
            width += step
        return int(latest.argmin()) if len(latest) and latest.min() < HELD else None

    def _spread(self, owner: str, count: int) -> None:
        """Place all extents anew in their old order, `owner`'s enlarged, free space shared out behind each.

        The gaps let the next growths happen in place, so that the cost of this is spread over many.
        """
        old = dict(self._held)
        sizes = {name: old[name][1] for name in sorted(old, key=lambda name: old[name][0])} | {owner: count}
        gap = (len(self._taken) - sum(sizes.values())) // len(sizes)
        assert gap >= 0, "more KV memory reserved than there is"
        first = 0
        for name, size in sizes.items():
            self._take(name, first, size)
            first += size + gap
        moves = [(*old[name], self._held[name][0]) for name in sizes if name in old]
        self._prefixes.move([(before, after, had) for before, had, after in moves])
        self._taken[:] = False
        for start, size in self._held.values():
            self._taken[start:start + size] = True
        # Invariant: those that move down go first, in ascending order, then those that move up, in descending
        # order; then no extent is overwritten before it has moved.
        for before, had, after in [m for m in moves if m[2] < m[0]] + [m for m in reversed(moves) if m[2] > m[0]]:
            self._move(before, after, had)

    def _move(self, old: int, new: int, count: int) -> None:
        source, target = (slice(unit * BLOCK_SIZE, (unit + count) * BLOCK_SIZE) for unit in (old, new))
        for pool in (*self._keys, *self._values):
            pool[:, target] = pool[:, source].clone()   # the two may overlap

    def _copy(self, units: Sequence[int], count: int, offset: int) -> None:
        """Copy the first `count` rows of these units to `offset`."""
        runs: list[tuple[int, int]] = []        # first row and rows of neighbouring units
        for start, unit in zip(range(0, count, BLOCK_SIZE), units):
            rows = min(BLOCK_SIZE, count - start)
            if runs and sum(runs[-1]) == unit * BLOCK_SIZE:
                runs[-1] = runs[-1][0], runs[-1][1] + rows
            else:
                runs.append((unit * BLOCK_SIZE, rows))
        overlap = any(first < offset + count and offset < first + rows for first, rows in runs)
        for pool in (*self._keys, *self._values):
            parts = [pool[:, first:first + rows] for first, rows in runs]
            if overlap:     # a copy in between costs several times as much, so only then
                parts = [part.clone() for part in parts]
            at = offset
            for part in parts:
                pool[:, at:at + part.shape[1]] = part
                at += part.shape[1]


def sizes(config: Any) -> tuple[int, int, int]:
    """Layers, KV heads and head size of a text model's config."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, dim
