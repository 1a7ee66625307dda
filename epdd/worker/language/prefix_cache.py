"""Which beginnings of prompts lie in KV memory, so that they need not be computed again; pure, without torch.

A tree of blocks.  Each stands for the BLOCK_SIZE items (or the last few) that follow its parent's, and for the unit of
KV memory where their keys and values lie.  An item is a token id, or a number that names an image in place of its
first placeholder: keys and values depend on nothing but the items up to theirs.  Items are compared themselves, no
hash of them, so that no prompt can hit another's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from epdd.worker.language.scheduler import BLOCK_SIZE


@dataclass(eq=False, slots=True)
class Block:
    """A unit of KV memory whose content is known."""

    items: tuple[int, ...]                                      # at most BLOCK_SIZE; with fewer it has no children
    unit: int
    parent: Block | None                                        # None: the root, which holds nothing
    children: list[Block] = field(default_factory=list)         # sorted by their items, no two alike


class PrefixCache:
    """The known blocks of so many units, each in a unit of its own, and when each was last wanted."""

    def __init__(self, units: int) -> None:
        self.used = np.zeros(units, np.int64)       # by unit, a count of wants; 0: it holds no known block
        self._at: list[Block | None] = [None] * units
        self._root = Block((), -1, None)
        self._clock = 0

    def find(self, items: Sequence[int]) -> tuple[list[int], int]:
        """The units that hold the longest known beginning of `items`, in order, and how many items that is."""
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
        return [block.unit for block in path], count

    def add(self, items: Sequence[int], unit: int) -> None:
        """Rows of `items` lie from `unit` on; blocks known already stay where they are known."""
        path: list[Block] = []
        parent = self._root
        for start in range(0, len(items), BLOCK_SIZE):
            part = tuple(items[start:start + BLOCK_SIZE])
            block, common = _closest(parent, part)
            if block is None or common < len(part):
                block = self._put(part, unit + start // BLOCK_SIZE, parent)
            path.append(block)
            parent = block
        self._touch(path)

    def drop(self, units: Iterable[int]) -> None:
        """Forget the blocks in these units, and those that continue them: nobody could find them any more."""
        for unit in units:
            block = self._at[unit]
            if block is not None:
                assert block.parent is not None, "the root has no unit"
                siblings = block.parent.children
                del siblings[bisect_left(siblings, block.items, key=_items)]
                gone = [block]
                while gone:
                    block = gone.pop()
                    self._at[block.unit], self.used[block.unit] = None, 0
                    gone += block.children

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Rows of `count` units have gone from `old` on to `new` on, for each (old, new, count), all at once."""
        lifted = [(self._at[old + i], self.used[old + i], new + i) for old, new, count in moves for i in range(count)]
        for old, _, count in moves:
            self._at[old:old + count], self.used[old:old + count] = [None] * count, 0
        for block, used, unit in lifted:
            if block is not None:
                assert self._at[unit] is None, "a unit holds two blocks"
                self._at[unit], self.used[unit], block.unit = block, used, unit

    def _put(self, items: tuple[int, ...], unit: int, parent: Block) -> Block:
        # What may be there is the same sequence's last block, known when it was shorter.
        self.drop([unit])
        block = self._at[unit] = Block(items, unit, parent)
        insort(parent.children, block, key=_items)
        return block

    def _touch(self, path: Sequence[Block]) -> None:
        """A block is wanted a little later than those that continue it, so that a beginning outlives its ends."""
        self._clock += len(path)
        for depth, block in enumerate(path):
            self.used[block.unit] = self._clock - depth


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
