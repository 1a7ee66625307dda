from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

from epdd.errors import ContextLength
from epdd.worker.language.scheduler import BLOCK_SIZE, Batch, Scheduler, Sequence


def sequence(name: str, prompt: int, answer: int, tenant: str = "") -> Sequence:
    return Sequence(name, [0] * prompt, prompt, prompt + answer, tenant=tenant)


def play(scheduler: Scheduler[Sequence], batch: Batch[Sequence]) -> list[Sequence]:
    """Runs a batch as the engine does; returns the sequences that ended."""
    ended = []
    for s, count in batch.chunks:
        s.computed += count
        if not s.pending:
            s.tokens.append(0)
            if len(s.tokens) == s.total_max:
                scheduler.remove(s)
                ended.append(s)
    return ended


def names(batch: Batch[Sequence]) -> list[tuple[str, int]]:
    return [(s.id, count) for s, count in batch.chunks]


def test_decode_goes_first_and_prefill_fills_the_budget() -> None:
    scheduler: Scheduler[Sequence] = Scheduler(4096, max_batched_tokens=16, max_sequences=8)
    scheduler.add(sequence("a", 10, 5))
    assert names(scheduler.next_batch()) == [("a", 10)]
    scheduler = Scheduler(4096, max_batched_tokens=16, max_sequences=8)
    for s in (sequence("a", 10, 5), sequence("b", 40, 5), sequence("c", 3, 5)):
        scheduler.add(s)
    steps = []
    for _ in range(4):
        batch = scheduler.next_batch()
        steps.append(names(batch))
        play(scheduler, batch)
    assert steps == [[("a", 10), ("b", 6)], [("a", 1), ("b", 15)], [("a", 1), ("b", 15)],
                     [("a", 1), ("b", 4), ("c", 3)]]


def test_prompts_beside_decoding_sequences_get_less() -> None:
    scheduler: Scheduler[Sequence] = Scheduler(4096, max_batched_tokens=16, max_sequences=8)
    for s in (sequence("a", 10, 3), sequence("b", 40, 5)):
        scheduler.add(s)
    steps = []
    for beside in (4, 4, 30, 4, 4):
        batch = scheduler.next_batch(beside)
        steps.append(names(batch))
        play(scheduler, batch)
    # Nobody decodes in the first step and in the last; 30 is over the budget.
    assert steps == [[("a", 10), ("b", 6)], [("a", 1), ("b", 4)], [("a", 1), ("b", 15)], [("b", 15)], [("b", 1)]]


def test_what_cannot_finish_alone_is_refused() -> None:
    scheduler: Scheduler[Sequence] = Scheduler(1000, max_batched_tokens=64, max_sequences=8)
    assert scheduler.capacity == 960
    with pytest.raises(ContextLength):
        scheduler.add(sequence("a", 900, 61))
    scheduler.add(sequence("b", 900, 60))


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    scheduler: Scheduler[Sequence] = Scheduler(4 * BLOCK_SIZE, max_batched_tokens=512, max_sequences=8, headroom=1)
    a, b, c = sequence("a", 100, 100), sequence("b", 60, 60), sequence("c", 10, 10)
    for s in (a, b, c):
        scheduler.add(s)
    play(scheduler, scheduler.next_batch())
    assert scheduler.running == [a, b, c] and scheduler.free == 0
    while not scheduler.preempted:
        batch = scheduler.next_batch()
        play(scheduler, batch)
    assert batch.preempted == [c] and c.reserved == c.computed == 0 and len(c.tokens) > 10
    assert scheduler.waiting[0] is c and scheduler.running == [a, b]


def test_a_pinned_sequence_is_never_preempted() -> None:
    scheduler: Scheduler[Sequence] = Scheduler(3 * BLOCK_SIZE, max_batched_tokens=512, max_sequences=8, headroom=1)
    a, b = sequence("a", 100, 80), sequence("b", 20, 40)
    for s in (a, b):
        scheduler.add(s)
    play(scheduler, scheduler.next_batch())
    assert b.complete
    b.pinned = True
    while not scheduler.preempted:
        play(scheduler, scheduler.next_batch())
    assert list(scheduler.waiting) == [a] and scheduler.running == [b]


def test_twins_wait_for_the_one_that_is_computed_and_nobody_for_them() -> None:
    found = {"b": 0, "c": 30}
    scheduler: Scheduler[Sequence] = Scheduler(4096, max_batched_tokens=16, max_sequences=8,
                                               begin=lambda s: found.get(s.id, 0))
    a, b, c = (sequence(name, 31, 5) for name in "abc")
    other = sequence("other", 5, 5)
    a.shared_prefill = b.shared_prefill = c.shared_prefill = 7
    for s in (a, b, c, other):
        scheduler.add(s)
    first = scheduler.next_batch()
    assert names(first) == [("a", 16)]
    play(scheduler, first)
    scheduler.remove(a)         # the next in line takes over, and only one
    second = scheduler.next_batch()
    assert names(second) == [("b", 16)] and list(scheduler.waiting) == [c, other]
    play(scheduler, second)
    third = scheduler.next_batch()
    assert names(third) == [("b", 15), ("other", 1)]
    play(scheduler, third)
    assert names(scheduler.next_batch()) == [("b", 1), ("other", 4), ("c", 1)]


def test_a_tenant_with_many_sequences_does_not_keep_others_waiting() -> None:
    scheduler: Scheduler[Sequence] = Scheduler(1 << 16, max_batched_tokens=64, max_sequences=4)
    for i in range(40):
        scheduler.add(sequence(f"many{i}", 4, 10 + i, "many"))
    ended = play(scheduler, scheduler.next_batch())
    for i in range(3):
        scheduler.add(sequence(f"few{i}", 4, 2, "few"))
    while scheduler.running or scheduler.waiting:
        ended += play(scheduler, scheduler.next_batch())
    order = [s.id for s in ended]
    # Each takes the next place that is free, and has it for two steps.
    assert [order.index(f"few{i}") for i in range(3)] == [3, 5, 6], order
    for tenant in ("many", "few"):
        assert [s.id for s in ended if s.tenant == tenant] == [
            f"{tenant}{i}" for i in range(40 if tenant == "many" else 3)]


@settings(max_examples=200, deadline=None)
@given(works=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 60), st.sampled_from("abc"), st.integers(0, 40)),
                      min_size=1, max_size=25), max_sequences=st.integers(1, 6), units=st.integers(4, 12))
def test_the_tenant_with_the_fewest_running_is_next(works: list[tuple[int, int, str, int]], max_sequences: int,
                                                    units: int) -> None:
    admitted: list[Sequence] = []

    def begin(s: Sequence) -> int:
        running = [other.tenant for other in scheduler.running if other is not s]
        waiting = {other.tenant for other in scheduler.waiting}
        assert running.count(s.tenant) <= min([running.count(tenant) for tenant in waiting], default=len(running))
        admitted.append(s)
        return 0

    scheduler: Scheduler[Sequence] = Scheduler(units * BLOCK_SIZE, 64, max_sequences, 1, begin)
    step, left = 0, len(works)
    while left:
        for i, (prompt, answer, tenant, arrives) in enumerate(works):
            if arrives == step:
                scheduler.add(sequence(str(i), prompt, answer, tenant))
        left -= len(play(scheduler, scheduler.next_batch()))
        step += 1
        assert step < 50_000
    assert {s.id for s in admitted} == {str(i) for i in range(len(works))}


@pytest.mark.parametrize("others", [1, 2, 9])
def test_no_tenant_starves_beside_others_that_never_stop(others: int) -> None:
    """A sequence that needs all memory, of a tenant that has another one running, beside new ones in every step."""
    scheduler: Scheduler[Sequence] = Scheduler(16 * BLOCK_SIZE, max_batched_tokens=64, max_sequences=4)
    scheduler.add(sequence("its other", 10, 100, "large"))
    large = sequence("large", 500, 16 * BLOCK_SIZE - 500, "large")
    scheduler.add(large)
    for step in range(5_000):
        for i in range(others):
            if sum(s.tenant == str(i) for s in scheduler.waiting) < 3:
                scheduler.add(sequence(f"{i} {step}", 5, 20, str(i)))
        if large in play(scheduler, scheduler.next_batch()):
            return
    raise AssertionError("never done")


@dataclass
class Work:
    prompt: int
    answer: int
    pinned: bool
    arrives: int
    cancelled: int | None
    shared_prefill: int | None
    found: float        # share of its tokens that it begins with
    tenant: str


WORK = st.builds(Work, prompt=st.integers(1, 300), answer=st.integers(1, 200), pinned=st.booleans(),
                 arrives=st.integers(0, 60), cancelled=st.none() | st.integers(0, 300),
                 shared_prefill=st.none() | st.integers(0, 1), found=st.sampled_from([0.0, 0.5, 1.0]),
                 tenant=st.sampled_from(["", "", "one", "two"]))


@settings(max_examples=100, deadline=None)
@given(works=st.lists(WORK, min_size=1, max_size=12), units=st.integers(8, 24), budget=st.sampled_from([1, 7, 64, 512]),
       max_sequences=st.integers(1, 12), headroom=st.sampled_from([1, 30, 512]))
def test_everyone_finishes_within_memory_and_budget(works: list[Work], units: int, budget: int, max_sequences: int,
                                                    headroom: int) -> None:
    scheduler: Scheduler[Sequence] = Scheduler(
        units * BLOCK_SIZE, budget, max_sequences, headroom,
        lambda s: int((len(s.tokens) - 1) * works[int(s.id)].found))
    alive: dict[str, tuple[Sequence, Work]] = {}
    arrived: list[Sequence] = []
    step = 0
    while step <= 300 or alive:
        for i, work in enumerate(works):
            if work.arrives == step and work.prompt + work.answer <= scheduler.capacity:
                s = sequence(str(i), work.prompt, work.answer, work.tenant)
                s.shared_prefill = work.shared_prefill
                scheduler.add(s)
                arrived.append(s)
                alive[s.id] = s, work
            if work.cancelled == step and str(i) in alive:
                scheduler.remove(alive.pop(str(i))[0])
        batch = scheduler.next_batch()
        counts = [count for _, count in batch.chunks]
        assert sum(counts) <= budget and len(scheduler.running) <= max_sequences
        assert bool(batch.chunks) or bool(batch.preempted) or not alive
        for s, count in batch.chunks:
            assert 0 < count <= s.pending and s.computed + count <= s.reserved and s in scheduler.running
        assert not set(map(id, batch.preempted)) & {id(s) for s, _ in batch.chunks}
        assert scheduler.free == scheduler.capacity - sum(s.reserved for s in scheduler.running) >= 0
        for queue in (scheduler.waiting, [s for s in scheduler.running if not s.pinned]):
            for tenant in ("", "one", "two"):
                order = [arrived.index(s) for s in queue if s.tenant == tenant]
                assert order == sorted(order) or any(work.shared_prefill is not None for work in works)
        computing = [s.shared_prefill for s in scheduler.running
                     if s.shared_prefill is not None and len(s.tokens) == s.prompt]
        assert len(computing) == len(set(computing))
        for s in play(scheduler, batch):
            del alive[s.id]
        for s, work in alive.values():
            s.pinned = s.pinned or work.pinned and s.complete and s.computed >= s.prompt
        step += 1
        assert step < 50_000
    assert scheduler.free == scheduler.capacity
