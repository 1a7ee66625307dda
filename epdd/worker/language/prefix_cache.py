"""Which prefixes of prompts lie in KV memory, so that they need not be computed again; pure, without torch.

A tree of blocks.  Each stands for the BLOCK_SIZE items (or the last few) that follow its parent's, and for the block of
KV memory where their keys and values lie.  An item is a token id, or a number that names an image in place of its
first placeholder: keys and values depend on nothing but the items up to theirs.  Items themselves are compared, not
hashes of them, so no prompt can hit another's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from epdd.worker.language.scheduler import BLOCK_SIZE


@dataclass(eq=False, slots=True)
class Block:
    """A block of KV memory whose content is known."""

    items: tuple[int, ...]                                      # at most BLOCK_SIZE; with fewer it has no children
    block_id: int
    parent: Block | None                                        # None: the root, which has no memory
    children: list[Block] = field(default_factory=list)         # sorted by their items, no two alike


class PrefixCache:
    """The known ones of `blocks` blocks of KV memory, and when each was last used."""

    def __init__(self, blocks: int) -> None:
        self.used = np.zeros(blocks, np.int64)      # by block id, a count of uses; 0: its content is not known
        self._at: list[Block | None] = [None] * blocks
        self._root = Block((), -1, None)
        self._clock = 0

    def find(self, items: Sequence[int]) -> tuple[list[int], int]:
        """The ids of the blocks with the longest known prefix of `items`, in order, and how many items that is."""
        path: list[Block] = []
        parent, count = self._root, 0
        while count < len(items):
            block, common = _closest(parent, tuple(items[count:count + BLOCK_SIZE]))
            if block is None or not common:
                break
            path.append(block)
            count += common
            if common < BLOCK_SIZE:
                break
            parent = block
        self._touch(path)
        return [block.block_id for block in path], count

    def add(self, items: Sequence[int], first: int) -> None:
        """Keys and values of `items` lie from block `first` on; blocks known already stay where they are known."""
        path: list[Block] = []
        parent = self._root
        for start in range(0, len(items), BLOCK_SIZE):
            part = tuple(items[start:start + BLOCK_SIZE])
            block, common = _closest(parent, part)
            if block is None or common < len(part):
                block = self._put(part, first + start // BLOCK_SIZE, parent)
            path.append(block)
            parent = block
        self._touch(path)

    def drop(self, block_ids: Iterable[int]) -> None:
        """Forget these blocks, and those that continue them: they could not be found any more."""
        for block_id in block_ids:
            block = self._at[block_id]
            if block is not None:
                assert block.parent is not None, "the root has no memory"
                siblings = block.parent.children
                del siblings[bisect_left(siblings, block.items, key=_items)]
                gone = [block]
                while gone:
                    block = gone.pop()
                    self._at[block.block_id], self.used[block.block_id] = None, 0
                    gone += block.children

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """The content of `count` blocks has moved from `old` to `new`, for each (old, new, count), all at once."""
        lifted = [(self._at[old + i], self.used[old + i], new + i) for old, new, count in moves for i in range(count)]
        for old, _, count in moves:
            self._at[old:old + count], self.used[old:old + count] = [None] * count, 0
        for block, used, block_id in lifted:
            if block is not None:
                assert self._at[block_id] is None, "two blocks in one place"
                self._at[block_id], self.used[block_id], block.block_id = block, used, block_id

    def _put(self, items: tuple[int, ...], block_id: int, parent: Block) -> Block:
        # The same sequence's last block may be known there, from when it was shorter.
        self.drop([block_id])
        block = self._at[block_id] = Block(items, block_id, parent)
        insort(parent.children, block, key=_items)
        return block

    def _touch(self, path: Sequence[Block]) -> None:
        """A block counts as used a little later than those that continue it, so that a prefix outlives what follows."""
        self._clock += len(path)
        for depth, block in enumerate(path):
            self.used[block.block_id] = self._clock - depth


def _items(block: Block) -> tuple[int, ...]:
    return block.items


def _closest(parent: Block, items: tuple[int, ...]) -> tuple[Block | None, int]:
    """The child that begins most like `items`, and how many items they share."""
    at = bisect_left(parent.children, items, key=_items)
    best, longest = None, 0
    for block in parent.children[max(0, at - 1):at + 1]:    # in sorted order it is a neighbour
        common = _common(block.items, items)
        if common > longest:
            best, longest = block, common
    return best, longest


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
