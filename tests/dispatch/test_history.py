"""The data of `epdctl explain`: every decision, for each request that depends on it."""

import asyncio
import os
import signal
import tracemalloc

import pytest

from epdd.dispatch.history import IMAGES_MAX, REQUESTS_MAX, History
from epdd.dispatch.request_record import EncodingRecord, RequestRecord
from epdd.errors import MediaError, NotFound, Rejected, WorkerTimeout
from epdd.settings.config import Config
from epdd.wire import Cancelled, Encoded
from tests.dispatch.fleet import expected, request, running


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_times_and_numbers_are_those_of_the_request():
    clock = Clock()
    history, first = History(), EncodingRecord()
    with history.record(request("r", b"a", b"b", record=RequestRecord("r", "mine", clock, 99.0))) as record:
        clock.now = 101.0
        record.acquired([first, None], [first])
        first.handed_over("encoder/1", "its turn", clock.now, 0.25, 0.5)
        assert history.explain("r")["images"][0]["hand_overs"][0]["outcome"] == "running"
        clock.now = 102.0
        first.hand_overs[-1].end(Encoded("e0", 16, 2048, "bfloat16", 0.75), clock.now)
        record.embedded()
        clock.now = 103.0
        record.placed("pd/1")
        clock.now = 104.5
        record.prefilled()
        assert (history.explain("r")["outcome"], history.explain("r")["ended_at_s"]) == ("running", None)
        clock.now = 106.0
    clock.now = 116.0
    assert history.explain("mine") == {
        "id": "r", "client_id": "mine", "age_s": 17.0, "tokens": 40, "outcome": "completed", "code": "", "error": "",
        "images_count": 2, "seconds": 7.0, "pd": "pd/1",
        "began_at_s": 1.0, "embedded_at_s": 3.0, "prefilled_at_s": 5.5, "ended_at_s": 7.0,
        "images": [
            {"patches": 64, "source": "encoded", "error": "", "hand_overs": [{
                "worker": "encoder/1", "reason": "its turn", "handed_over_at_s": 2.0, "waited_s": 0.25,
                "predicted_s": 0.5, "seconds": 0.75, "outcome": "encoded", "error": "",
                "ended_at_s": 3.0}]},
            {"patches": 64, "source": "cache", "error": "", "hand_overs": []}],
        "placements": [{"worker": "pd/1", "placed_at_s": 4.0, "prefilled_at_s": 5.5, "error": ""}]}


def test_an_image_placed_again_waited_only_while_nobody_had_it():
    history, image = History(), EncodingRecord()
    with history.record(request("r", b"x")) as record:
        record.acquired([image], [image])
        image.handed_over("encoder/0", "", 101.0, 1.0, 0.1)
        image.hand_overs[-1].end(Cancelled("e0"), 105.0)
        image.handed_over("encoder/1", "", 105.5, 5.5, 0.1)
        tries = history.explain("r")["images"][0]["hand_overs"]
    assert [(each["waited_s"], each["outcome"]) for each in tries] == [(1.0, "cancelled"), (0.5, "running")]


def test_the_same_picture_twice_is_one_encoding():
    history, image = History(), EncodingRecord()
    with history.record(request("r", b"x", b"x")) as record:
        record.acquired([image, image], [image])
        image.handed_over("encoder/0", "", 100.0, 0.0, 0.1)
    told = history.explain("r")["images"]
    assert [each["source"] for each in told] == ["encoded", "repeated"]
    assert told[0]["hand_overs"] == told[1]["hand_overs"] != []


def test_an_encoding_that_still_ends_is_not_mixed_with_the_next_of_its_image():
    history, old, new = History(), EncodingRecord(), EncodingRecord()
    with pytest.raises(asyncio.CancelledError), history.record(request("old", b"x")) as record:
        record.acquired([old], [old])
        old.handed_over("encoder/0", "", 100.0, 0.0, 0.1)
        raise asyncio.CancelledError
    with history.record(request("new", b"x")) as record:
        record.acquired([new], [new])
        new.handed_over("encoder/1", "", 100.0, 0.0, 0.1)
        old.hand_overs[-1].end(Cancelled("e0"), 101.0)
    found = [history.explain(name)["images"][0]["hand_overs"] for name in ("old", "new")]
    assert [[(each["worker"], each["outcome"]) for each in tries] for tries in found] == [
        [("encoder/0", "cancelled")], [("encoder/1", "running")]]


@pytest.mark.parametrize("raised, answered, outcome, code", [
    (GeneratorExit(), False, "aborted", ""), (GeneratorExit(), True, "completed", ""),
    (asyncio.CancelledError(), False, "aborted", ""), (WorkerTimeout("late"), False, "failed", "timeout"),
    (ZeroDivisionError("secret"), False, "failed", "internal_error")])
def test_how_a_request_ends(raised, answered, outcome, code):
    history = History()
    with pytest.raises(type(raised)), history.record(request("r")) as record:
        record.answered = answered
        raise raised
    told = history.explain("r")
    assert (told["outcome"], told["code"]) == (outcome, code)
    assert "secret" not in told["error"]


async def test_a_request_cut_off_at_its_deadline_was_not_left_by_its_client():
    history, now = History(), asyncio.get_running_loop().time()
    for name, deadline in (("late", now), ("left", now + 60)):
        with pytest.raises(asyncio.CancelledError), history.record(request(name, deadline=deadline)):
            raise asyncio.CancelledError
    assert [(each["outcome"], each["code"]) for each in history.last()] == [("aborted", ""), ("failed", "timeout")]


def test_ids():
    history = History()
    for name, client_id in (("chatcmpl-1", "same"), ("chatcmpl-2", "same"), ("chatcmpl-3", "")):
        with history.record(request(name, record=RequestRecord(name, client_id))):
            pass
    assert [history.explain(name)["id"] for name in ("chatcmpl-1", "2", "same")] == [
        "chatcmpl-1", "chatcmpl-2", "chatcmpl-2"]
    for name in ("", "chatcmpl-", "9"):
        with pytest.raises(NotFound, match="no request"):
            history.explain(name)


def test_memory_is_bounded():
    """Filled with the largest requests of the default settings: each image encoded, with a long reason."""
    history = History()
    tracemalloc.start()
    for i in range(REQUESTS_MAX + 100):
        images = [EncodingRecord() for _ in range(16)]
        with history.record(request(f"chatcmpl-{i:032}", *(b"%d" % k for k in range(16)))) as record:
            record.acquired(images, images)
            for k, image in enumerate(images):
                image.handed_over("encoder/0", f"finishes in {i}.{k} s, before the {k} jobs that faster workers would "
                                  "take", i + 0.0, i + 0.1, i + 0.2)
                image.hand_overs[-1].end(Encoded("e", 16, 2048, "bfloat16", i + 0.3), i + 0.4)
            record.embedded()
            record.placed("pd/0")
            record.prefilled()
    del images, image, record
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{size / 1e6:.1f} MB")
    assert len(history.last()) == REQUESTS_MAX and 1e6 < size < 16e6
    with history.record(request("huge", *(b"%d" % k for k in range(IMAGES_MAX)))):
        pass
    assert [each["id"] for each in history.last()] == ["huge"]


async def test_requests_that_join_an_encoding_show_its_decision():
    async with running(encoders=2, encode_s=0.05) as fleet:
        first = asyncio.create_task(fleet.ask(request("first", b"same", b"own")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.gather(first, fleet.ask(request("second", b"same")))
        await fleet.ask(request("third", b"same"))
        first, second, third = (fleet.history.explain(name) for name in ("first", "second", "third"))
        assert [each["source"] for each in first["images"]] == ["encoded", "encoded"]
        assert {each["hand_overs"][0]["worker"] for each in first["images"]} == {"encoder/0", "encoder/1"}
        joined, = second["images"]
        assert joined["source"] == "joined"
        theirs, ours = first["images"][0]["hand_overs"][0], joined["hand_overs"][0]
        for key in ("worker", "reason", "waited_s", "predicted_s", "seconds", "outcome"):
            assert theirs[key] == ours[key]
        # The fake's samples are 1 ms a patch.
        assert ours["predicted_s"] == pytest.approx(0.064, rel=0.1) and ours["seconds"] == 0.05
        assert "finishes first" in ours["reason"]
        assert third["images"] == [{"patches": 64, "source": "cache", "error": "", "hand_overs": []}]
        for each in (first, second, third):
            times = [each[name] for name in ("began_at_s", "embedded_at_s", "prefilled_at_s", "ended_at_s")]
            assert each["outcome"] == "completed" and times == sorted(times)
        assert first["embedded_at_s"] >= 0.05 > third["embedded_at_s"]


async def test_what_was_lost_with_whom():
    async with running(encoders=2, deadly="poison") as fleet:
        with pytest.raises(Rejected):
            await fleet.ask(request("r", b"poison"))
        told = fleet.history.explain("r")
        tries = told["images"][0]["hand_overs"]
        assert [each["outcome"] for each in tries] == ["lost", "lost"]
        assert all(f"{each['worker']} was lost (killed by signal 9" in each["error"] for each in tries)
        assert (told["outcome"], told["code"], told["placements"]) == ("failed", "image_rejected", [])
        assert told["images"][0]["error"] == told["error"] == "an encoder crashed on this image, twice"


async def test_a_broken_image_among_good_ones_is_named():
    async with running(encoders=1) as fleet:
        with pytest.raises(MediaError):
            await fleet.ask(request("r", b"fine", b"broken file"))
        good, bad = fleet.history.explain("r")["images"]
        assert (good["error"], bad["error"]) == ("", "the image is damaged")
        assert bad["hand_overs"][0]["outcome"] == "failed"


async def test_a_lost_pd_worker_and_the_next():
    async with running(pds=2) as fleet:
        pids = {worker.name: worker.process.pid for worker in fleet.supervisor.role("pd")}
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)        # no token can be out before the worker is lost
        ask = asyncio.create_task(fleet.ask(request("r", b"a")))
        while not fleet.history.last() or not (lost := fleet.history.explain("r")["pd"]):
            await asyncio.sleep(0.01)
        os.kill(pids.pop(lost), signal.SIGKILL)
        (left, pid), = pids.items()
        os.kill(pid, signal.SIGCONT)
        assert await ask == [expected(b"a")]
        told = fleet.history.explain("r")
        first, second = told["placements"]
        assert (first["worker"], first["prefilled_at_s"]) == (lost, None)
        assert f"{lost} was lost (killed by signal 9" in first["error"]
        assert (second["worker"], second["error"], told["pd"]) == (left, "", left)
        assert told["prefilled_at_s"] == second["prefilled_at_s"] > second["placed_at_s"]
        assert told["images"][0]["source"] == "encoded" and len(told["images"][0]["hand_overs"]) == 1


async def test_an_image_that_waits_and_then_is_dropped():
    config = Config().with_values("fleet", {"backoff_s": 100.0, "min_uptime_s": 99.0}, "test")
    async with running(encoders=1, config=config) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        worker.process.kill()       # it comes back, but not soon
        while worker.takes_work:
            await asyncio.sleep(0.01)
        ask = asyncio.create_task(fleet.ask(request("r", b"a")))
        while not fleet.history.last() or not fleet.encoding.router.queue:
            await asyncio.sleep(0)
        assert fleet.history.explain("r")["images"] == [
            {"patches": 64, "source": "encoded", "error": "", "hand_overs": []}]
        ask.cancel()
        await asyncio.wait([ask])
        told = fleet.history.explain("r")
        assert (told["outcome"], told["embedded_at_s"], told["pd"]) == ("aborted", None, None)
