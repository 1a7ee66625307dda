"""Schedules of dispatch explored by tools/explore: none breaks an invariant, and planted faults are found."""

import gc
from contextlib import aclosing
from dataclasses import replace

import pytest

from epdd.dispatch.encoder_cache.arena_space import ArenaSpace
from epdd.dispatch.encoder_cache.cache import EncoderCache
from epdd.dispatch.encoder_cache.extents import Extents
from epdd.dispatch.encoding import Encoding
from epdd.dispatch.pipeline import Pipeline, Restarted
from epdd.dispatch.request import Request
from epdd.errors import WorkerLost
from epdd.fleet.channel import Work
from epdd.fleet.supervisor import Supervisor
from epdd.wire import Encoded, Failed
from tools.explore.__main__ import SMALL, all_of, at_random, explore
from tools.explore.memory import Violation

pytestmark = pytest.mark.takes(70)


@pytest.fixture(autouse=True, scope="module")
def nothing_left():
    """Clients of other tests that are collected in an explored loop would close themselves in it."""
    gc.collect()


def test_a_thousand_random_schedules_hold():
    explore("seeds", at_random(1_000_000, 1000))


@pytest.mark.parametrize("name", ["one request, cancelled, a death", "one image for two", "room for one of two",
                                  "an answer sent whole, a death"])
def test_every_schedule_of_a_small_scenario_holds(name):
    explore(name, all_of(SMALL[name]))


def released_with_the_request(monkeypatch):
    """Fault: bytes are freed with the last request, while a process may touch them."""
    def release(self, embedding):
        self._dereference(embedding)
        if embedding.ref_count == 0 and not embedding.ready:
            pins, embedding.pins = embedding.pins, 0
            self._drop(embedding)
            embedding.pins = pins
            embedding.dropped = False
        self._freed()
    monkeypatch.setattr(EncoderCache, "release", release)


def released_twice(monkeypatch):
    unpin = EncoderCache.unpin

    def twice(self, embedding):
        dropped = embedding.dropped
        unpin(self, embedding)
        if dropped and embedding.pins == 0:
            self.host.extents.release(embedding.lease.offset, embedding.lease.size)
    monkeypatch.setattr(EncoderCache, "unpin", twice)


def readers_hold_nothing(monkeypatch):
    """Fault: a PD worker's reading does not hold its bytes."""
    start = Pipeline._start

    def without(*args):
        work, unpin = start(*args)
        unpin()
        return work, unpin
    monkeypatch.setattr(Pipeline, "_start", without)


def held_until_cancelled(monkeypatch):
    """Fault: a work counts as ended when it is cancelled, not when it has stopped."""
    cancel = Work.cancel

    def at_once(self):
        cancel(self)
        calls, self._on_end = self._on_end, []
        for call in calls:
            call()
    monkeypatch.setattr(Work, "cancel", at_once)


def works_end_with_their_socket(monkeypatch):
    """Fault: a lost worker's bytes are freed while its process may still run."""
    restart = Supervisor.restart

    def early(self, name):
        worker = self.find(name)
        channel = worker.channel
        restart(self, name)
        if channel is not None:
            channel.fail(WorkerLost("restarted"))
    monkeypatch.setattr(Supervisor, "restart", early)


def nobody_is_woken(monkeypatch):
    """Fault: room that is freed at a work's end wakes no waiting request."""
    unpin = EncoderCache.unpin

    def silent(self, embedding):
        waiting, self._waiting = self._waiting, type(self._waiting)()
        unpin(self, embedding)
        self._waiting = waiting
    monkeypatch.setattr(EncoderCache, "unpin", silent)


def holes_stay(monkeypatch):
    """Fault: a request waits although only cached embeddings are in its way."""
    monkeypatch.setattr(ArenaSpace, "only_cached", False)


def the_cancelled_is_not_tried_again(monkeypatch):
    """Fault: an image that is requested again while its cancelled encoding ends is never encoded."""
    ended = Encoding._ended

    def forgets(self, job, worker, event):
        if not isinstance(event, (Encoded, Failed)) and hasattr(event, "id"):
            refs, job.embedding.ref_count = job.embedding.ref_count, 0
            ended(self, job, worker, event)
            job.embedding.ref_count = refs
        else:
            ended(self, job, worker, event)
    monkeypatch.setattr(Encoding, "_ended", forgets)


def an_embedding_is_kept_after_its_shrink(monkeypatch):
    """Fault: the whole lease is freed instead of its unused tail."""
    def shrink(self, offset, length, wanted):
        self.release(offset, length)
    monkeypatch.setattr(Extents, "shrink", shrink)


def requests_take_what_they_get(monkeypatch):
    """Fault: a choice that is cut short keeps its leases for ever."""
    release = Pipeline._release

    def keep_one(self, embeddings):
        del embeddings[1:2]
        release(self, embeddings)
    monkeypatch.setattr(Pipeline, "_release", keep_one)


def streams_begin_anew(monkeypatch):
    """Fault: a stream repeats tokens that it has sent."""
    run = Pipeline.run
    monkeypatch.setattr(Pipeline, "run", lambda self, request: run(self, replace(request, whole=True)))


def nobody_hears_that_all_begins_anew(monkeypatch):
    """Fault: the retry's answer is appended to the first one's beginning."""
    run = Pipeline.run

    async def silent(self, request):
        async with aclosing(run(self, request)) as answers:
            async for answer in answers:
                if not isinstance(answer[1], Restarted):
                    yield answer
    monkeypatch.setattr(Pipeline, "run", silent)


def images_that_are_gone_are_encoded_again(monkeypatch):
    """Fault: a retry assumes that the answer's images are still there."""
    monkeypatch.setattr(Request, "has_images", True)


FAULTS = (released_with_the_request, released_twice, readers_hold_nothing, held_until_cancelled,
          works_end_with_their_socket, nobody_is_woken, holes_stay, the_cancelled_is_not_tried_again,
          an_embedding_is_kept_after_its_shrink, requests_take_what_they_get, streams_begin_anew,
          nobody_hears_that_all_begins_anew, images_that_are_gone_are_encoded_again)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(Violation) as found:
        explore("planted", at_random(0, 3000))
    assert "TypeError" not in str(found.value)      # the planted fault was found, not an error of the plant
