"""Leases as a state machine: whatever happens in whatever order, no byte is held twice and none is lost."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epdd.arena import PAGE
from epdd.dispatch.encoder_cache.leases import Leases
from epdd.dispatch.request import Image
from epdd.errors import ArenaFull, MediaError


def image(name: str) -> Image:
    return Image(name.encode(), 1, 1, (1, 2, 2), 1, name)


async def acquired(leases, names, pages=1):
    images = [image(name) for name in names]
    return await leases.acquire(images, [pages * PAGE] * len(images))


class LeaseMachine(RuleBasedStateMachine):
    """Requests come and go, encoders answer or die, readers hold on; a model counts who is where."""

    PAGES = 6

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.leases = Leases(self.PAGES * PAGE, 3 * PAGE)
        self.requests = []          # lists of embeddings some request wants
        self.unencoded = []         # fresh, not yet handed to a worker
        self.encoding = []          # held by an encoder
        self.reading = []           # held by a PD worker

    def teardown(self):
        self.loop.close()

    @rule(names=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4), pages=st.integers(1, 2))
    def acquire(self, names, pages):
        images = [image(name) for name in names]
        got = self.leases._try(images, [pages * PAGE] * len(images))
        if got is not None:
            self.requests.append(got[0])
            self.unencoded += got[1]
            assert [e.key for e in got[0]] == names

    @precondition(lambda self: any(not e.dropped for e in self.unencoded))
    @rule(data=st.data())
    def begin(self, data):
        embedding = data.draw(st.sampled_from([e for e in self.unencoded if not e.dropped]))
        self.unencoded.remove(embedding)
        self.leases.hold(embedding)
        self.encoding.append(embedding)

    @precondition(lambda self: self.encoding)
    @rule(data=st.data(), end=st.sampled_from(["written", "failed", "cancelled"]))
    def encoded(self, data, end):
        embedding = data.draw(st.sampled_from(self.encoding))
        self.encoding.remove(embedding)
        if end == "written":
            self.leases.written(embedding, max(1, embedding.lease.size // 2), "float32")
        elif end == "failed" or embedding.refs:
            self.leases.failed(embedding, MediaError("bad"))
        self.leases.unhold(embedding)

    @precondition(lambda self: any(e.ready for r in self.requests for e in r))
    @rule(data=st.data())
    def read(self, data):
        embedding = data.draw(st.sampled_from([e for r in self.requests for e in r if e.ready]))
        self.leases.hold(embedding)
        self.reading.append(embedding)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def stop_reading(self, data):
        embedding = data.draw(st.sampled_from(self.reading))
        self.reading.remove(embedding)
        self.leases.unhold(embedding)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data):
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        for embedding in request:
            self.leases.release(embedding)

    def touched(self):
        """Every embedding whose bytes someone may look at."""
        wanted = [e for r in self.requests for e in r if e.failure is None]
        return set(wanted + self.encoding + self.reading)

    @invariant()
    def no_bytes_twice(self):
        spans = sorted((e.lease.offset, e.lease.offset + e.lease.size) for e in self.touched())
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
        for start, end in spans:
            assert all(end <= a or b <= start for a, b in self.leases._extents._free)

    @invariant()
    def cache_within_its_limit(self):
        assert self.leases.cached_bytes <= 3 * PAGE
        idle = [e for e in self.leases._entries.values() if e.ready and not e.refs]
        assert self.leases.cached_bytes == sum(self.leases._extents.rounded(e.lease.size) for e in idle)

    @invariant()
    def nothing_lost(self):
        if not self.touched():
            assert self.leases.used_bytes == self.leases.cached_bytes


LeaseMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase


async def test_same_image_is_encoded_once_and_then_a_hit():
    leases = Leases(4 * PAGE, 4 * PAGE)
    first, fresh = await acquired(leases, ["a", "a", "b"])
    assert [e.key for e in fresh] == ["a", "b"] and first[0] is first[1]
    second, fresh_again = await acquired(leases, ["a"])
    assert second[0] is first[0] and fresh_again == []
    leases.written(first[0], 10, "float32")
    for embedding in [*first, *second]:
        leases.release(embedding)
    third, fresh = await acquired(leases, ["a"])
    assert third[0] is first[0] and fresh == []
    assert (leases.counts.misses, leases.counts.joined, leases.counts.hits) == (2, 1, 1)


async def test_waits_in_turn_and_holds_nothing_meanwhile():
    leases = Leases(3 * PAGE, 3 * PAGE)
    big, _ = await acquired(leases, ["a", "b"])
    waits = [asyncio.create_task(acquired(leases, names)) for names in (["c", "d"], ["e"])]
    await asyncio.sleep(0)
    assert leases.waiting == 2 and leases.used_bytes == 2 * PAGE   # "e" would fit but it is not its turn
    for embedding in big:
        leases.release(embedding)
    results = await asyncio.gather(*waits)
    assert [[e.key for e in got[0]] for got in results] == [["c", "d"], ["e"]]


async def test_a_cancelled_wait_leaves_the_queue_and_wakes_the_next():
    leases = Leases(2 * PAGE, 2 * PAGE)
    held, _ = await acquired(leases, ["a"])
    first = asyncio.create_task(acquired(leases, ["b", "c"]))
    second = asyncio.create_task(acquired(leases, ["d"]))
    await asyncio.sleep(0)
    first.cancel()
    got, _ = await asyncio.wait_for(second, 60)
    assert got[0].key == "d" and leases.waiting == 0
    for embedding in [*held, *got]:
        leases.release(embedding)
    assert leases.used_bytes == 0


async def test_more_than_the_arena_is_refused():
    with pytest.raises(ArenaFull):
        await acquired(Leases(2 * PAGE, 0), ["a", "b", "c"])


async def test_oldest_unused_is_evicted_first_and_a_read_one_never():
    leases = Leases(2 * PAGE, 2 * PAGE)
    (a,), _ = await acquired(leases, ["a"])
    (b,), _ = await acquired(leases, ["b"])
    for embedding in (a, b):
        leases.written(embedding, PAGE, "float32")
        leases.release(embedding)
    leases.hold(a)                              # a PD worker still reads it
    (c,), _ = await acquired(leases, ["c"])
    assert c.lease.offset == b.lease.offset and leases.counts.evictions == 1
    (again,), fresh = await acquired(leases, ["a"])
    assert again is a and fresh == []


async def test_used_again_is_kept_longer():
    leases = Leases(3 * PAGE, 3 * PAGE)
    for name in ("a", "b", "c", "a"):           # "a" is used once more after the others
        (embedding,), fresh = await acquired(leases, [name])
        if fresh:
            leases.written(embedding, PAGE, "float32")
        leases.release(embedding)
    (new,), _ = await acquired(leases, ["d"])
    assert sorted(leases._entries) == ["a", "c", "d"] and new.lease.offset == PAGE


async def test_failure_reaches_all_who_wait_and_the_next_tries_afresh():
    leases = Leases(2 * PAGE, 2 * PAGE)
    (one,), _ = await acquired(leases, ["a"])
    await acquired(leases, ["a"])
    waits = [asyncio.create_task(one.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    leases.failed(one, MediaError("bad"))
    assert all(isinstance(e, MediaError) for e in await asyncio.gather(*waits, return_exceptions=True))
    (fresh,), to_encode = await acquired(leases, ["a"])
    assert fresh is not one and to_encode == [fresh]


async def test_holes_between_what_is_only_cached_keep_nobody_waiting():
    leases = Leases(3 * PAGE, 3 * PAGE)
    for name in ("a", "b"):
        (embedding,), _ = await acquired(leases, [name])
        leases.written(embedding, PAGE, "float32")
        if name == "a":
            first = embedding
        else:
            leases.release(embedding)
    leases.release(first)                       # "b" lies in the middle, and is the last that room is made by
    images = [image("c"), image("d")]
    got, fresh = await asyncio.wait_for(leases.acquire(images, [PAGE, 2 * PAGE]), 60)
    assert [e.key for e in fresh] == ["c", "d"] and leases.used_bytes == 3 * PAGE
    for embedding in got:
        leases.written(embedding, PAGE, "float32")
        leases.release(embedding)


async def test_a_requests_own_cached_image_in_the_middle_does_not_keep_it_waiting():
    leases = Leases(3 * PAGE, 3 * PAGE)
    got, _ = await acquired(leases, ["a", "b"])
    for embedding in got:
        leases.written(embedding, PAGE, "float32")
        leases.release(embedding)
    images = [image("b"), image("large")]       # "b" lies in the middle: no hole has two pages
    wanted, fresh = await asyncio.wait_for(leases.acquire(images, [PAGE, 2 * PAGE]), 60)
    assert fresh == wanted and wanted[0] is not got[1], "its own image was to be encoded anew"
    assert leases.counts.evictions == 2


async def test_room_that_somebody_still_holds_is_waited_for_and_costs_no_cache_beyond():
    leases = Leases(3 * PAGE, 3 * PAGE)
    (held,), _ = await acquired(leases, ["held"])
    (kept,), _ = await acquired(leases, ["kept"])
    leases.written(kept, PAGE, "float32")
    leases.release(kept)
    wait = asyncio.create_task(leases.acquire([image("kept"), image("large")], [PAGE, 2 * PAGE]))
    await asyncio.sleep(0)
    assert leases.waiting == 1 and leases.entries == 2
    leases.release(held)
    (same, _), fresh = await asyncio.wait_for(wait, 60)
    assert leases.used_bytes == 3 * PAGE and (same is kept) == (len(fresh) == 1)
