"""Arenas of GPU memory beside the host's, as a state machine: encoders come, write and die in any order."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epdd.arena import PAGE
from epdd.dispatch.encoder_cache.cache import HOST, EncoderCache
from tests.dispatch.encoder_cache.test_cache import image

POOL_PAGES = 3


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.cache = EncoderCache(6 * PAGE, 3 * PAGE)
        self.numbers = 0
        self.requests, self.unencoded, self.reading = [], [], []
        self.encoding = []          # (embedding, the lease that it is written to)

    def teardown(self):
        self.loop.close()

    def pick(self, data, things):
        return data.draw(st.sampled_from(things))

    @property
    def living(self):
        return sorted(self.cache.arenas.keys() - {HOST})

    @precondition(lambda self: len(self.living) < 3)
    @rule()
    def encoder_comes(self):
        self.numbers += 1
        self.cache.add_arena(self.numbers, POOL_PAGES * PAGE)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def encoder_dies(self, data):
        number = self.pick(data, self.living)
        self.cache.lose_arena(number)
        for embedding, place in [entry for entry in self.encoding if entry[1].arena == number]:
            # Its works end after that, and what somebody wants is queued again.
            self.encoding.remove((embedding, place))
            self.cache.end_encoding(embedding, place)
            if embedding.ref_count:
                self.unencoded.append(embedding)

    @rule(names=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3), pages=st.integers(1, 2))
    def acquire(self, names, pages):
        got = self.cache._try([image(name) for name in names], [pages * PAGE] * len(names))
        if got is not None:
            assert not any(embedding.lost for embedding in got[0])
            self.requests.append(got[0])
            self.unencoded += got[1]

    @precondition(lambda self: any(not e.dropped for e in self.unencoded))
    @rule(data=st.data(), placed=st.booleans())
    def begin(self, data, placed):
        embedding = self.pick(data, [e for e in self.unencoded if not e.dropped])
        self.unencoded.remove(embedding)
        arena = self.pick(data, self.living) if placed and self.living else HOST
        place = self.cache.begin_encoding(embedding, arena, embedding.lease.size // 2)
        self.encoding.append((embedding, place))

    @precondition(lambda self: self.encoding)
    @rule(data=st.data(), well=st.booleans())
    def encoded(self, data, well):
        embedding, place = self.pick(data, self.encoding)
        self.encoding.remove((embedding, place))
        if well:
            self.cache.written(embedding, max(1, embedding.lease.size // 4), "bfloat16")
            assert (embedding.lease.arena, embedding.lease.offset) == (place.arena, place.offset)
        elif embedding.ref_count:
            self.unencoded.append(embedding)
        self.cache.end_encoding(embedding, place)

    def whole(self):
        return [e for request in self.requests for e in request if e.ready and not e.lost]

    @precondition(lambda self: self.whole())
    @rule(data=st.data())
    def read(self, data):
        embedding = self.pick(data, self.whole())
        self.cache.pin(embedding)
        self.reading.append(embedding)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def stop_reading(self, data):
        embedding = self.pick(data, self.reading)
        self.reading.remove(embedding)
        self.cache.unpin(embedding)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data):
        request = self.pick(data, self.requests)
        self.requests.remove(request)
        for embedding in request:
            self.cache.release(embedding)

    @precondition(lambda self: self.whole())
    @rule(data=st.data())
    def forget(self, data):
        lying = [embedding for embedding in self.whole() if embedding.lease.arena]
        if lying:
            self.cache.lose(self.pick(data, lying))

    @invariant()
    def no_bytes_twice(self):
        touched = {e for request in self.requests for e in request} | set(self.reading) | {e for e, _ in self.encoding}
        # What is lost is out of everybody's reach but that of who reads it.
        leases = [e.lease for e in touched if e.pins or not e.lost]
        leases += [place for _, place in self.encoding if place.arena]
        spans = sorted((lease.arena, lease.offset, lease.offset + lease.size) for lease in leases
                       if lease.arena in self.cache.arenas)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(spans, spans[1:]))
        for number, low, high in spans:
            extents = self.cache.arenas[number].extents
            assert all(end <= low or high <= start for start, end in extents._free)

    @invariant()
    def nobody_finds_what_is_lost(self):
        for embedding in self.cache._entries.values():
            assert not embedding.lost and embedding.lease.arena in self.cache.arenas

    @invariant()
    def nothing_leaks(self):
        if not self.requests and not self.reading and not self.encoding:
            for space in self.cache.arenas.values():
                assert space.used_bytes == space.cached_bytes == sum(
                    space.extents.rounded(entry.lease.size) for entry in space.evictable.values())


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
