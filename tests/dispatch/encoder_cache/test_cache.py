"""The encoder cache as a state machine: whatever happens in whatever order, no byte is held twice and none is lost."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epdd.arena import PAGE
from epdd.dispatch.encoder_cache.cache import EncoderCache
from epdd.dispatch.request import Image
from epdd.errors import ArenaFull, MediaError


def image(name: str) -> Image:
    return Image(name.encode(), 1, 1, (1, 2, 2), 1, name)


async def acquired(cache, names, pages=1):
    images = [image(name) for name in names]
    return await cache.acquire(images, [pages * PAGE] * len(images))


class LeaseMachine(RuleBasedStateMachine):
    """Requests come and go, encoders answer or die, readers hold leases; a model counts them."""

    PAGES = 6

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.cache = EncoderCache(self.PAGES * PAGE, 3 * PAGE)
        self.requests = []          # lists of embeddings some request wants
        self.unencoded = []         # fresh, not yet handed to a worker
        self.encoding = []          # held by an encoder
        self.reading = []           # held by a PD worker

    def teardown(self):
        self.loop.close()

    @rule(names=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4), pages=st.integers(1, 2))
    def acquire(self, names, pages):
        images = [image(name) for name in names]
        got = self.cache._try(images, [pages * PAGE] * len(images))
        if got is not None:
            self.requests.append(got[0])
            self.unencoded += got[1]
            assert [e.key for e in got[0]] == names

    @precondition(lambda self: any(not e.dropped for e in self.unencoded))
    @rule(data=st.data())
    def begin(self, data):
        embedding = data.draw(st.sampled_from([e for e in self.unencoded if not e.dropped]))
        self.unencoded.remove(embedding)
        self.cache.pin(embedding)
        self.encoding.append(embedding)

    @precondition(lambda self: self.encoding)
    @rule(data=st.data(), end=st.sampled_from(["written", "failed", "cancelled"]))
    def encoded(self, data, end):
        embedding = data.draw(st.sampled_from(self.encoding))
        self.encoding.remove(embedding)
        if end == "written":
            self.cache.written(embedding, max(1, embedding.lease.size // 2), "float32")
        elif end == "failed" or embedding.ref_count:
            self.cache.failed(embedding, MediaError("bad"))
        self.cache.unpin(embedding)

    @precondition(lambda self: any(e.ready for r in self.requests for e in r))
    @rule(data=st.data())
    def read(self, data):
        embedding = data.draw(st.sampled_from([e for r in self.requests for e in r if e.ready]))
        self.cache.pin(embedding)
        self.reading.append(embedding)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def stop_reading(self, data):
        embedding = data.draw(st.sampled_from(self.reading))
        self.reading.remove(embedding)
        self.cache.unpin(embedding)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data):
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        for embedding in request:
            self.cache.release(embedding)

    def touched(self):
        """Every embedding whose bytes a process may read or write."""
        wanted = [e for r in self.requests for e in r if e.failure is None]
        return set(wanted + self.encoding + self.reading)

    @invariant()
    def no_bytes_twice(self):
        spans = sorted((e.lease.offset, e.lease.offset + e.lease.size) for e in self.touched())
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
        for start, end in spans:
            assert all(end <= a or b <= start for a, b in self.cache.host.extents._free)

    @invariant()
    def cache_within_its_limit(self):
        assert self.cache.host.cached_bytes <= 3 * PAGE
        idle = [e for e in self.cache._entries.values() if e.ready and not e.ref_count]
        assert self.cache.host.cached_bytes == sum(self.cache.host.extents.rounded(e.lease.size) for e in idle)

    @invariant()
    def nothing_lost(self):
        if not self.touched():
            assert self.cache.host.used_bytes == self.cache.host.cached_bytes


LeaseMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase


async def test_same_image_is_encoded_once_and_then_a_hit():
    cache = EncoderCache(4 * PAGE, 4 * PAGE)
    first, fresh = await acquired(cache, ["a", "a", "b"])
    assert [e.key for e in fresh] == ["a", "b"] and first[0] is first[1]
    second, fresh_again = await acquired(cache, ["a"])
    assert second[0] is first[0] and fresh_again == []
    cache.written(first[0], 10, "float32")
    for embedding in [*first, *second]:
        cache.release(embedding)
    third, fresh = await acquired(cache, ["a"])
    assert third[0] is first[0] and fresh == []
    assert (cache.counts.misses, cache.counts.joined, cache.counts.hits) == (2, 1, 1)


async def test_waits_in_turn_and_holds_nothing_meanwhile():
    cache = EncoderCache(3 * PAGE, 3 * PAGE)
    big, _ = await acquired(cache, ["a", "b"])
    waits = [asyncio.create_task(acquired(cache, names)) for names in (["c", "d"], ["e"])]
    await asyncio.sleep(0)
    assert cache.waiting == 2 and cache.host.used_bytes == 2 * PAGE   # "e" would fit but it is not its turn
    for embedding in big:
        cache.release(embedding)
    results = await asyncio.gather(*waits)
    assert [[e.key for e in got[0]] for got in results] == [["c", "d"], ["e"]]


async def test_a_cancelled_wait_leaves_the_queue_and_wakes_the_next():
    cache = EncoderCache(2 * PAGE, 2 * PAGE)
    held, _ = await acquired(cache, ["a"])
    first = asyncio.create_task(acquired(cache, ["b", "c"]))
    second = asyncio.create_task(acquired(cache, ["d"]))
    await asyncio.sleep(0)
    first.cancel()
    got, _ = await asyncio.wait_for(second, 60)
    assert got[0].key == "d" and cache.waiting == 0
    for embedding in [*held, *got]:
        cache.release(embedding)
    assert cache.host.used_bytes == 0


async def test_more_than_the_arena_is_refused():
    with pytest.raises(ArenaFull):
        await acquired(EncoderCache(2 * PAGE, 0), ["a", "b", "c"])


async def test_oldest_unused_is_evicted_first_and_a_read_one_never():
    cache = EncoderCache(2 * PAGE, 2 * PAGE)
    (a,), _ = await acquired(cache, ["a"])
    (b,), _ = await acquired(cache, ["b"])
    for embedding in (a, b):
        cache.written(embedding, PAGE, "float32")
        cache.release(embedding)
    cache.pin(a)                              # a PD worker still reads it
    (c,), _ = await acquired(cache, ["c"])
    assert c.lease.offset == b.lease.offset and cache.counts.evictions == 1
    (again,), fresh = await acquired(cache, ["a"])
    assert again is a and fresh == []


async def test_used_again_is_kept_longer():
    cache = EncoderCache(3 * PAGE, 3 * PAGE)
    for name in ("a", "b", "c", "a"):           # "a" is used once more after the others
        (embedding,), fresh = await acquired(cache, [name])
        if fresh:
            cache.written(embedding, PAGE, "float32")
        cache.release(embedding)
    (new,), _ = await acquired(cache, ["d"])
    assert sorted(cache._entries) == ["a", "c", "d"] and new.lease.offset == PAGE


async def test_failure_reaches_all_who_wait_and_the_next_tries_afresh():
    cache = EncoderCache(2 * PAGE, 2 * PAGE)
    (one,), _ = await acquired(cache, ["a"])
    await acquired(cache, ["a"])
    waits = [asyncio.create_task(one.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    cache.failed(one, MediaError("bad"))
    assert all(isinstance(e, MediaError) for e in await asyncio.gather(*waits, return_exceptions=True))
    (fresh,), to_encode = await acquired(cache, ["a"])
    assert fresh is not one and to_encode == [fresh]


async def test_holes_between_what_is_only_cached_keep_nobody_waiting():
    cache = EncoderCache(3 * PAGE, 3 * PAGE)
    for name in ("a", "b"):
        (embedding,), _ = await acquired(cache, [name])
        cache.written(embedding, PAGE, "float32")
        if name == "a":
            first = embedding
        else:
            cache.release(embedding)
    cache.release(first)                       # "b" lies in the middle, and is the last that room is made by
    images = [image("c"), image("d")]
    got, fresh = await asyncio.wait_for(cache.acquire(images, [PAGE, 2 * PAGE]), 60)
    assert [e.key for e in fresh] == ["c", "d"] and cache.host.used_bytes == 3 * PAGE
    for embedding in got:
        cache.written(embedding, PAGE, "float32")
        cache.release(embedding)


async def test_a_requests_own_cached_image_in_the_middle_does_not_keep_it_waiting():
    cache = EncoderCache(3 * PAGE, 3 * PAGE)
    got, _ = await acquired(cache, ["a", "b"])
    for embedding in got:
        cache.written(embedding, PAGE, "float32")
        cache.release(embedding)
    images = [image("b"), image("large")]       # "b" lies in the middle: no hole has two pages
    wanted, fresh = await asyncio.wait_for(cache.acquire(images, [PAGE, 2 * PAGE]), 60)
    assert fresh == wanted and wanted[0] is not got[1], "its own image was to be encoded anew"
    assert cache.counts.evictions == 2


async def test_room_that_somebody_still_holds_is_waited_for_and_costs_no_cache_beyond():
    cache = EncoderCache(3 * PAGE, 3 * PAGE)
    (held,), _ = await acquired(cache, ["held"])
    (kept,), _ = await acquired(cache, ["kept"])
    cache.written(kept, PAGE, "float32")
    cache.release(kept)
    wait = asyncio.create_task(cache.acquire([image("kept"), image("large")], [PAGE, 2 * PAGE]))
    await asyncio.sleep(0)
    assert cache.waiting == 1 and cache.entries == 2
    cache.release(held)
    (same, _), fresh = await asyncio.wait_for(wait, 60)
    assert cache.host.used_bytes == 3 * PAGE and (same is kept) == (len(fresh) == 1)
