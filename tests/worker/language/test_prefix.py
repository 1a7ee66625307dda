"""The prefix tree over KV memory is right after any reserving, moving, growing and releasing."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epdd.worker.language import attention, kv_cache
from epdd.worker.language.prefix_cache import Block, PrefixCache
from epdd.worker.language.scheduler import BLOCK_SIZE

CONFIG = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=1, head_dim=1)
CPU = torch.device("cpu")
UNITS = 12
IMAGE = 1 << 161        # larger than any token id
# Runs of equal items, so that many sequences begin alike and part at any place, also inside a unit.
CUTS = [1, 30, BLOCK_SIZE, BLOCK_SIZE, 100]
RUNS = st.lists(st.tuples(st.sampled_from([1, 2, IMAGE]), st.sampled_from(CUTS)), min_size=1, max_size=4)


def items_of(runs: list[tuple[int, int]]) -> list[int]:
    return [item for item, count in runs for _ in range(count)]


def rows_of(items: list[int]) -> torch.Tensor:
    """Fake keys: each row is a hash of all items up to its own."""
    state, rows = hashlib.blake2b(digest_size=4), []
    for item in items:
        state.update(str(item).encode() + b" ")
        rows.append(int.from_bytes(state.digest()) % (1 << 24))    # exact in float32
    return torch.tensor(rows, dtype=torch.float32)


class Machine(RuleBasedStateMachine):
    """Sequences begin, grow, share their prefixes and end, within the memory that they reserve."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = kv_cache.KVPool(CONFIG, UNITS * BLOCK_SIZE, torch.float32, CPU)
        self.alive: dict[str, list[int]] = {}           # items whose rows are written
        self.size: dict[str, int] = {}                  # units reserved
        self.shared: dict[str, int] = {}                # items of each that others may begin with
        self.names = 0

    def write(self, owner: str, start: int) -> None:
        rows = rows_of(self.alive[owner])[None, None, start:, None]
        plan = attention.plan([(rows.shape[2], self.pool.offset(owner), start)], CPU)
        self.pool.at(plan.slots).update(rows, -rows, 0)

    def free(self) -> int:
        return UNITS - sum(self.size.values())

    @precondition(lambda self: self.free())
    @rule(runs=RUNS, extra=st.integers(0, 2))
    def begin(self, runs: list[tuple[int, int]], extra: int) -> None:
        items = items_of(runs)[:self.free() * BLOCK_SIZE]
        size = min(-(-len(items) // BLOCK_SIZE) + extra, self.free())
        owner, self.names = str(self.names), self.names + 1
        found = self.pool.begin(owner, size * BLOCK_SIZE, items)
        assert found <= len(items)      # and these are right: no promise of how many, for memory may be short
        self.alive[owner], self.size[owner], self.shared[owner] = items[:found], size, 0
        self.check(owner)
        self.alive[owner] = items
        if found < len(items):
            self.write(owner, found)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), runs=RUNS)
    def grow(self, data: Any, runs: list[tuple[int, int]]) -> None:
        owner, more = data.draw(st.sampled_from(sorted(self.alive))), items_of(runs)
        items = self.alive[owner] + more
        size = max(self.size[owner], -(-len(items) // BLOCK_SIZE))
        if size - self.size[owner] > self.free():
            return
        self.pool.reserve(owner, size * BLOCK_SIZE)
        start, self.alive[owner], self.size[owner] = len(self.alive[owner]), items, size
        self.write(owner, start)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def share(self, data: Any) -> None:
        owner = data.draw(st.sampled_from(sorted(self.alive)))
        count = data.draw(st.integers(self.shared[owner], len(self.alive[owner])))
        self.pool.share(owner, self.alive[owner][:count])
        self.shared[owner] = count

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        owner = data.draw(st.sampled_from(sorted(self.alive)))
        self.pool.release(owner)
        self.pool.release(owner)
        del self.alive[owner], self.size[owner], self.shared[owner]

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.shared = dict.fromkeys(self.shared, 0)
        assert self.pool.cached == 0 and not self.pool._prefixes.used.any()

    def check(self, owner: str) -> None:
        offset, items = self.pool.offset(owner), self.alive[owner]
        wanted = rows_of(items)
        assert torch.equal(self.pool._keys[0][0, offset:offset + len(items), 0], wanted)
        assert torch.equal(self.pool._values[0][0, offset:offset + len(items), 0], -wanted)

    @invariant()
    def content_is_whole(self) -> None:
        for owner in self.alive:
            self.check(owner)

    @invariant()
    def extents_are_apart_and_account_for_all_that_is_taken(self) -> None:
        held = [unit for first, count in self.pool._extents.values() for unit in range(first, first + count)]
        assert len(held) == len(set(held)) == sum(self.size.values())
        assert sorted(held) == self.pool._taken.nonzero()[0].tolist()

    @invariant()
    def every_known_block_holds_what_it_says(self) -> None:
        known = self.pool._prefixes
        seen: dict[int, Block] = {}
        todo: list[tuple[Block, list[int]]] = [(known._root, [])]
        while todo:
            block, before = todo.pop()
            assert [child.items for child in block.children] == sorted({child.items for child in block.children})
            for child in block.children:
                assert child.parent is block and child.block_id not in seen and known._at[child.block_id] is child
                assert 0 < known.used[child.block_id] and (block is known._root or
                                                           known.used[child.block_id] < known.used[block.block_id])
                assert len(child.items) == BLOCK_SIZE or 0 < len(child.items) < BLOCK_SIZE and not child.children
                items, first = before + list(child.items), child.block_id * BLOCK_SIZE
                rows = self.pool._keys[0][0, first:first + len(child.items), 0]
                assert torch.equal(rows, rows_of(items)[len(before):])
                seen[child.block_id] = child
                todo.append((child, items))
        assert sorted(seen) == [unit for unit, block in enumerate(known._at) if block]
        assert sorted(seen) == known.used.nonzero()[0].tolist()
        assert self.pool.cached == BLOCK_SIZE * sum(not self.pool._taken[unit] for unit in seen)

    def teardown(self) -> None:
        for owner in list(self.alive):
            self.pool.release(owner)
        assert not self.pool._taken.any()
        self.pool.begin("all", UNITS * BLOCK_SIZE, [])     # what is kept gives way at once
        assert self.pool.cached == 0 and not self.pool._prefixes.used.any()


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestMachine = Machine.TestCase


def test_the_longest_beginning_is_found_at_any_cut() -> None:
    known = PrefixCache(16)
    long = list(range(200))
    known.add(long, 4)
    assert known.find(long[:130]) == ([4, 5, 6], 130)
    for cut in (1, 63, 64, 65, 128, 199):
        assert known.find(long[:cut] + [777] * 70) == ([4, 5, 6, 7][:-(-cut // BLOCK_SIZE)], cut)
    assert known.find([777]) == known.find([]) == ([], 0)
    known.add(long[:100] + [5] * 10, 8)     # its first unit is known already
    assert known.find(long[:100] + [5] * 10) == ([4, 9], 110) and known.used[8] == 0


def test_the_longest_unwanted_goes_first_and_its_beginning_last() -> None:
    pool = kv_cache.KVPool(CONFIG, 6 * BLOCK_SIZE, torch.float32, CPU)
    for name in (1, 2):
        pool.begin(str(name), 3 * BLOCK_SIZE, [])
        pool.share(str(name), [name] * 3 * BLOCK_SIZE)
    for name in (1, 2):
        pool.release(str(name))
    assert pool.cached == 6 * BLOCK_SIZE
    assert pool._prefixes.find([1] * 200)[1] == 3 * BLOCK_SIZE      # wanted again: now the other is older
    pool.begin("a", 2 * BLOCK_SIZE, [9])
    assert pool._prefixes.find([2] * 200)[1] == BLOCK_SIZE
    pool.begin("b", 2 * BLOCK_SIZE, [9])
    assert [pool._prefixes.find([name] * 200)[1] for name in (1, 2)] == [BLOCK_SIZE, BLOCK_SIZE]
    assert pool.cached == 2 * BLOCK_SIZE


class Hand:
    """A pool whose sequences are written as they begin."""

    def __init__(self, units: int) -> None:
        self.machine = Machine()
        self.machine.pool = kv_cache.KVPool(CONFIG, units * BLOCK_SIZE, torch.float32, CPU)

    def begin(self, name: str, units: int, items: list[int]) -> int:
        """Write and share `items`; the first unit it was given."""
        machine = self.machine
        found = machine.pool.begin(name, units * BLOCK_SIZE, items)
        machine.alive[name] = items
        if found < len(items):
            machine.write(name, found)
        machine.check(name)
        machine.pool.share(name, items)
        return machine.pool.offset(name) // BLOCK_SIZE


def test_a_place_over_what_was_found() -> None:
    """The first block lies where the second one's copy goes, and the other way round."""
    hand = Hand(3)
    first, second = [1] * BLOCK_SIZE, [2] * BLOCK_SIZE
    assert hand.begin("pad", 2, []) == 0 and hand.begin("a", 1, first) == 2
    hand.machine.pool.release("pad")
    assert hand.begin("b", 2, first + second) == 0
    for name in "ab":
        hand.machine.pool.release(name)
    assert hand.begin("d", 1, []) == 0 and hand.machine.pool._prefixes.find(first + second) == ([2, 1], 128)
    assert hand.begin("c", 2, first + second) == 1


def test_what_was_found_moves_up_with_its_owner() -> None:
    hand = Hand(5)
    for i in range(5):
        assert hand.begin(str(i), 1, [i] * BLOCK_SIZE) == i
    for name in "024":
        hand.machine.pool.release(name)
    assert hand.begin("c", 3, [1] * BLOCK_SIZE + [7]) == 2
    assert [hand.machine.pool.offset(name) // BLOCK_SIZE for name in "13"] == [0, 1]
    for name in "13":
        hand.machine.check(name)
