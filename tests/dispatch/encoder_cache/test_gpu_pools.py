"""Leases with GPU pools beside the host's arena, as a state machine: encoders come, write and die in any order."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epdd.arena import PAGE
from epdd.dispatch.encoder_cache.leases import Leases
from tests.dispatch.encoder_cache.test_leases import image

POOL_PAGES = 3


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.leases = Leases(6 * PAGE, 3 * PAGE)
        self.numbers = 0
        self.requests, self.unencoded, self.reading = [], [], []
        self.encoding = []          # (embedding, the lease that it is written to)

    def teardown(self):
        self.loop.close()

    def pick(self, data, things):
        return data.draw(st.sampled_from(things))

    @property
    def living(self):
        return sorted(self.leases.gpu.pools)

    @precondition(lambda self: len(self.living) < 3)
    @rule()
    def encoder_comes(self):
        self.numbers += 1
        self.leases.gpu.add(self.numbers, POOL_PAGES * PAGE)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def encoder_dies(self, data):
        number = self.pick(data, self.living)
        self.leases.gpu.lose(number)
        for embedding, place in [entry for entry in self.encoding if entry[1].arena == number]:
            # Its works end after that, and what somebody wants is queued again.
            self.encoding.remove((embedding, place))
            self.leases.gpu.leave(embedding, place)
            self.leases.unhold(embedding)
            if embedding.refs:
                self.unencoded.append(embedding)

    @rule(names=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3), pages=st.integers(1, 2))
    def acquire(self, names, pages):
        got = self.leases._try([image(name) for name in names], [pages * PAGE] * len(names))
        if got is not None:
            assert not any(embedding.lost for embedding in got[0])
            self.requests.append(got[0])
            self.unencoded += got[1]

    @precondition(lambda self: any(not e.dropped for e in self.unencoded))
    @rule(data=st.data(), placed=st.booleans())
    def begin(self, data, placed):
        embedding = self.pick(data, [e for e in self.unencoded if not e.dropped])
        self.unencoded.remove(embedding)
        self.leases.hold(embedding)
        place = None
        if placed and self.living:
            place = self.leases.gpu.place(embedding, self.pick(data, self.living), embedding.lease.size // 2)
        self.encoding.append((embedding, place or embedding.lease))

    @precondition(lambda self: self.encoding)
    @rule(data=st.data(), well=st.booleans())
    def encoded(self, data, well):
        embedding, place = self.pick(data, self.encoding)
        self.encoding.remove((embedding, place))
        if well:
            self.leases.written(embedding, max(1, embedding.lease.size // 4), "bfloat16")
            assert (embedding.lease.arena, embedding.lease.offset) == (place.arena, place.offset)
        elif embedding.refs:
            self.unencoded.append(embedding)
        self.leases.gpu.leave(embedding, place)
        self.leases.unhold(embedding)

    def whole(self):
        return [e for request in self.requests for e in request if e.ready and not e.lost]

    @precondition(lambda self: self.whole())
    @rule(data=st.data())
    def read(self, data):
        embedding = self.pick(data, self.whole())
        self.leases.hold(embedding)
        self.reading.append(embedding)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def stop_reading(self, data):
        embedding = self.pick(data, self.reading)
        self.reading.remove(embedding)
        self.leases.unhold(embedding)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data):
        request = self.pick(data, self.requests)
        self.requests.remove(request)
        for embedding in request:
            self.leases.release(embedding)

    @precondition(lambda self: self.whole())
    @rule(data=st.data())
    def forget(self, data):
        lying = [embedding for embedding in self.whole() if embedding.lease.arena]
        if lying:
            self.leases.gpu.forget(self.pick(data, lying))

    @invariant()
    def no_bytes_twice(self):
        touched = {e for request in self.requests for e in request} | set(self.reading) | {e for e, _ in self.encoding}
        # What is lost is out of everybody's reach but that of who reads it.
        leases = [e.lease for e in touched if e.holds or not e.lost] + [e.place for e in touched if e.place]
        spans = sorted((lease.arena, lease.offset, lease.offset + lease.size) for lease in leases
                       if lease.arena == 0 or lease.arena in self.leases.gpu.pools)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(spans, spans[1:]))
        for number, low, high in spans:
            extents = self.leases.gpu.pools[number].extents if number else self.leases._extents
            assert all(end <= low or high <= start for start, end in extents._free)

    @invariant()
    def nobody_finds_what_is_lost(self):
        for embedding in self.leases._entries.values():
            assert not embedding.lost and (not embedding.lease.arena or embedding.lease.arena in self.leases.gpu.pools)

    @invariant()
    def nothing_leaks(self):
        if not self.requests and not self.reading and not self.encoding:
            assert self.leases.used_bytes == self.leases.cached_bytes
            for pool in self.leases.gpu.pools.values():
                assert pool.used_bytes == pool.cached_bytes and pool.members == set(pool.idle.values())


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
