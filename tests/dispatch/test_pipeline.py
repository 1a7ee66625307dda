"""The whole of dispatch with real processes: right bytes to the right request, and nothing left behind."""

import asyncio
import os
import random
import signal

import pytest

from epdd.dispatch import pipeline
from epdd.dispatch.pipeline import ANSWER_TOKENS, Restarted
from epdd.errors import ArenaFull, MediaError, NoWorker, OutOfMemory, ProtocolError, Rejected, WorkerLost, WorkerTimeout
from epdd.fleet.worker import State
from epdd.settings.config import Config
from epdd.wire import Tokens
from tests.dispatch.fleet import ROWS, expected, request, running


async def test_each_request_reads_its_own_images_in_order():
    async with running(encoders=3, pds=2) as fleet:
        asks = []
        for i in range(40):
            images = [b"image %d" % random.Random(i * 9 + k).randrange(30) for k in range(i % 9)]
            asks.append((fleet.ask(request(f"r{i}", *images)), expected(*images)))
        answers = await asyncio.gather(*(ask for ask, _ in asks))
        assert [answer for answer, in answers] == [wanted for _, wanted in asks]
        await fleet.at_rest()


async def test_eight_images_are_spread_over_all_encoders():
    async with running(encoders=4, encode_s=0.02) as fleet:
        await fleet.ask(request("r", *(b"picture %d" % i for i in range(8))))
        assert [worker.done for worker in fleet.supervisor.role("encoder")] == [2, 2, 2, 2]


async def test_identical_images_at_once_are_encoded_once_then_cached():
    async with running(encode_s=0.05) as fleet:
        answers = await asyncio.gather(*(fleet.ask(request(f"r{i}", b"same")) for i in range(8)))
        assert answers == [[expected(b"same")]] * 8
        assert sum(worker.done for worker in fleet.supervisor.role("encoder")) == 1
        await fleet.ask(request("again", b"same"))
        assert sum(worker.done for worker in fleet.supervisor.role("encoder")) == 1
        assert fleet.cache.counts.hits == 1 and fleet.cache.counts.joined == 7


async def test_first_of_many_leaves_and_the_others_still_get_it():
    async with running(encoders=1, encode_s=0.2) as fleet:
        first = asyncio.create_task(fleet.ask(request("r0", b"same")))
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(fleet.ask(request(f"r{i}", b"same"))) for i in range(1, 8)]
        await asyncio.sleep(0.02)
        first.cancel()
        assert await asyncio.gather(*others) == [[expected(b"same")]] * 7
        await fleet.at_rest()


async def test_an_image_fault_is_the_clients_and_harms_nobody_else():
    async with running() as fleet:
        good = asyncio.create_task(fleet.ask(request("good", b"fine")))
        with pytest.raises(MediaError) as caught:
            await fleet.ask(request("bad", b"fine too", b"broken file"))
        assert caught.value.code == "image_parse_error" and caught.value.status == 400
        assert await good == [expected(b"fine")]
        await fleet.at_rest()


async def test_an_image_that_lacks_memory_is_tried_alone_once_more_and_told_so():
    async with running(encoders=2) as fleet:
        good = [asyncio.create_task(fleet.ask(request(f"r{i}", b"%d" % i))) for i in range(8)]
        with pytest.raises(OutOfMemory) as caught:
            await fleet.ask(request("bad", b"no memory for this"))
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        assert await asyncio.gather(*good) == [[expected(b"%d" % i)] for i in range(8)]
        assert sum(worker.failed for worker in fleet.supervisor.role("encoder")) == 2
        assert fleet.encoding.crashes.entries == 0
        await fleet.at_rest()


async def test_an_embedding_of_the_wrong_size_is_never_read():
    async with running() as fleet:
        with pytest.raises(ProtocolError):
            await fleet.ask(request("r", b"lie"))
        assert await fleet.ask(request("next", b"fine")) == [expected(b"fine")]
        await fleet.at_rest()


async def test_n_choices_share_one_encoding():
    async with running() as fleet:
        assert await fleet.ask(request("r", b"x", n=3)) == [expected(b"x")] * 3
        assert sum(worker.done for worker in fleet.supervisor.role("encoder")) == 1
        await fleet.at_rest()


async def test_many_images_of_one_tenant_do_not_keep_another_waiting():
    async with running(encoders=1, encode_s=0.02) as fleet:
        order = []

        async def ask(tenant, i):
            await fleet.ask(request(f"{tenant}{i}", b"%b %d" % (tenant.encode(), i), tenant=tenant))
            order.append(tenant)

        many = [asyncio.create_task(ask("many", i)) for i in range(40)]
        while len(fleet.encoding.router.queue) < 30:
            await asyncio.sleep(0)
        ahead = len(order)
        await ask("few", 0)
        await asyncio.gather(*many)
        # Those that the encoder had, and their turn.
        assert order.index("few") - ahead < 15, order
        await fleet.at_rest()
        assert not fleet.encoding.router.queue._encoding


async def test_what_nobody_reads_is_bounded(monkeypatch):
    monkeypatch.setattr(pipeline, "UNREAD_MAX", 50)
    async with running() as fleet:
        answers = fleet.pipeline.run(request("unread", max_tokens=500))
        assert await anext(answers)
        await fleet.at_rest()       # the worker is told to stop, though nobody reads on
        seen = 0
        with pytest.raises(WorkerTimeout, match="reads"):
            async for _ in answers:
                seen += 1
        assert 40 < seen <= 51
        assert await fleet.ask(request("next", b"fine")) == [expected(b"fine")]


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.25, 0.45])
async def test_leaving_at_any_stage_leaves_nothing(after_s):
    async with running(encoders=1, encode_s=0.1, token_s=0.05) as fleet:
        task = asyncio.create_task(fleet.ask(request("r", b"a", b"b", max_tokens=500)))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await fleet.at_rest()
        assert await fleet.ask(request("next", b"a")) == [expected(b"a")]


async def test_a_full_arena_makes_requests_wait_not_fail():
    async with running(arena_bytes=4 * 4096, cache_bytes=0, encode_s=0.01) as fleet:
        asks = [fleet.ask(request(f"r{i}", b"%d" % i, b"%d!" % i)) for i in range(12)]
        answers = await asyncio.gather(*asks)
        assert answers == [[expected(b"%d" % i, b"%d!" % i)] for i in range(12)]
        with pytest.raises(ArenaFull):
            await fleet.ask(request("too much", *(b"%d" % i for i in range(5))))
        await fleet.at_rest()
        assert fleet.cache.host.used_bytes == 0


async def test_work_of_a_killed_encoder_is_placed_again():
    async with running(encoders=2, encode_s=0.1) as fleet:
        asks = [asyncio.create_task(fleet.ask(request(f"r{i}", b"%d" % i))) for i in range(8)]
        await asyncio.sleep(0.05)
        os.kill(fleet.supervisor.find("encoder/0").process.pid, signal.SIGKILL)
        assert await asyncio.gather(*asks) == [[expected(b"%d" % i)] for i in range(8)]
        await fleet.ready()
        assert fleet.supervisor.find("encoder/0").restarts == 1
        await fleet.at_rest()


async def test_an_image_that_kills_two_encoders_is_given_up():
    async with running(encoders=2, deadly="poison") as fleet:
        for _ in range(3):
            with pytest.raises(Rejected) as caught:
                await fleet.ask(request("r", b"good", b"poison"))
            assert (caught.value.status, caught.value.code) == (400, "image_rejected")
        await fleet.ready()
        assert sum(worker.restarts for worker in fleet.supervisor.role("encoder")) == 2
        poison = fleet.encoding.crashes
        assert (poison.entries, poison.counts.images, poison.counts.refused) == (1, 1, 2)
        assert await fleet.ask(request("next", b"good")) == [expected(b"good")]
        await fleet.at_rest()


async def test_an_image_in_an_encoder_that_an_operator_restarts_twice_is_no_poison():
    async with running(encoders=1, encode_s=0.3) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        ask = asyncio.create_task(fleet.ask(request("r", b"a")))
        for _ in range(2):
            while not worker.in_flight:
                await asyncio.sleep(0.01)
            fleet.supervisor.restart("encoder/0")
            await asyncio.sleep(0.05)
        with pytest.raises(WorkerLost):
            await ask
        assert fleet.encoding.crashes.entries == 0
        assert await fleet.ask(request("again", b"a")) == [expected(b"a")]


async def test_a_prompt_that_kills_two_workers_is_refused_and_the_innocent_come_through():
    config = Config().with_values("fleet", {"backoff_s": 0.01}, "test")
    async with running(encoders=1, deadly_prompt=4 + ROWS + 2, config=config) as fleet:
        # Answers of one token: whose second one is lost with the poison cannot be placed again.
        asks = [request("poison", b"a"), *(request(f"r{i}", *[b"b"] * (i % 4 * 2), max_tokens=1) for i in range(20))]
        answers = await asyncio.gather(*map(fleet.ask, asks), return_exceptions=True)
        assert isinstance(answers[0], Rejected) and answers[0].code == "prompt_rejected"
        assert answers[1:] == [[expected(*[b"b"] * (i % 4 * 2), max_tokens=1)] for i in range(20)]
        with pytest.raises(Rejected):
            await fleet.ask(request("poison again", b"a"))
        assert fleet.supervisor.find("pd/0").restarts == 2
        assert await fleet.ask(request("next", b"a", b"b")) == [expected(b"a", b"b")]
        await fleet.at_rest()


async def test_many_images_that_kill_do_not_take_an_encoder_from_the_others():
    config = Config().with_values("fleet", {"backoff_s": 0.01, "max_failures": 2}, "test")
    async with running(encoders=1, deadly="poison", config=config) as fleet:
        for i in range(4):
            assert await fleet.ask(request("good", b"good %d" % i)) == [expected(b"good %d" % i)]
            with pytest.raises(Rejected):
                await fleet.ask(request("bad", b"poison %d" % i))
        await fleet.ready()
        assert fleet.supervisor.find("encoder/0").restarts == 8


async def test_the_innocent_do_not_fail_with_the_image_that_kills():
    async with running(encoders=1, deadly="poison") as fleet:
        answers = await asyncio.gather(*(fleet.ask(request(f"r{i}", image)) for i, image in enumerate(
            [b"poison", b"good", b"fine"])), return_exceptions=True)
        assert isinstance(answers[0], Rejected)
        assert answers[1:] == [[expected(b"good")], [expected(b"fine")]]
        await fleet.ready()
        assert fleet.supervisor.find("encoder/0").restarts == 2
        await fleet.at_rest()


async def test_an_image_that_kills_is_tried_again_without_company():
    async with running(encoders=2, deadly="poison") as fleet:
        fleet.supervisor.drain("encoder/1")
        asks = [asyncio.create_task(fleet.ask(request(name, name.encode()))) for name in ("poison", "good")]
        while fleet.supervisor.find("encoder/0").in_flight < 2:
            await asyncio.sleep(0)
        fleet.supervisor.resume("encoder/1")        # where both go when encoder/0 has died over the first
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert isinstance(answers[0], Rejected) and answers[1] == [expected(b"good")]
        await fleet.at_rest()


async def test_an_encoder_is_handed_the_next_image_before_it_is_done_and_no_sooner():
    # The fake's time model says 64 ms an image: 0.1 s before its end it holds one more, and a third in the last 36 ms.
    config = Config().with_values("encoder", {"ahead_s": 0.1}, "test")
    async with running(encoders=1, encode_s=0.064, config=config) as fleet:
        worker, most = fleet.supervisor.find("encoder/0"), 0
        ask = asyncio.create_task(fleet.ask(request("r", *(b"%d" % i for i in range(9)))))
        while not ask.done():
            assert worker.in_flight == len(fleet.held("encoder/0")) <= 3
            most = max(most, worker.in_flight)
            await asyncio.sleep(0)
        assert await ask == [expected(*(b"%d" % i for i in range(9)))] and most >= 2


async def test_leases_are_released_when_the_prompt_is_read_not_when_the_answer_ends():
    async with running(token_s=0.05) as fleet:
        answers = fleet.pipeline.run(request("r", b"a", b"b", max_tokens=200))
        await anext(answers)
        assert [(e.ref_count, e.pins) for e in fleet.cache._entries.values()] == [(0, 0), (0, 0)]
        await answers.aclose()
        await fleet.at_rest()


async def test_an_image_cut_short_and_wanted_again_has_lost_no_try():
    async with running(encoders=1, encode_s=0.2) as fleet:
        worker = fleet.supervisor.find("encoder/0")
        ahead = asyncio.create_task(fleet.ask(request("ahead", b"first")))
        leaving = asyncio.create_task(fleet.ask(request("r0", b"same")))
        while worker.in_flight < 2:
            await asyncio.sleep(0)
        job = fleet.held("encoder/0")[1]
        leaving.cancel()
        coming = asyncio.create_task(fleet.ask(request("r1", b"same")))
        assert await asyncio.gather(ahead, coming) == [[expected(b"first")], [expected(b"same")]]
        assert job.attempts.begun == 1
        await fleet.at_rest()


async def test_without_encoders_images_are_refused_at_once_and_text_is_served():
    async with running(encoders=1, encode_s=0.3) as fleet:
        asks = [asyncio.create_task(fleet.ask(request(f"r{i}", b"%d" % i))) for i in range(9)]
        while not fleet.supervisor.find("encoder/0").in_flight:
            await asyncio.sleep(0)
        held = len(fleet.held("encoder/0"))
        fleet.supervisor.drain("encoder/0")
        answers = await asyncio.gather(*asks, return_exceptions=True)
        # What it has it finishes; what waits for it, and what comes later, would wait for an operator.
        assert answers[:held] == [[expected(b"%d" % i)] for i in range(held)]
        assert all(isinstance(answer, NoWorker) for answer in answers[held:]) and held < 9
        with pytest.raises(NoWorker):
            await fleet.ask(request("late", b"new"))
        assert await fleet.ask(request("cached", b"0")) == [expected(b"0")]
        assert await fleet.ask(request("text")) == [expected()]
        fleet.supervisor.resume("encoder/0")
        assert await fleet.ask(request("again", b"new")) == [expected(b"new")]
        await fleet.at_rest()


async def test_images_wait_for_an_encoder_that_comes_back():
    async with running(encoders=1) as fleet:
        fleet.supervisor.find("encoder/0").process.kill()
        assert await fleet.ask(request("r", b"a")) == [expected(b"a")]


async def test_a_request_that_leaves_takes_its_images_out_of_the_queue():
    config = Config().with_values("fleet", {"backoff_s": 100.0, "min_uptime_s": 99.0}, "test")
    async with running(encoders=1, config=config) as fleet:
        fleet.supervisor.find("encoder/0").process.kill()       # it comes back, but not soon
        asks = [asyncio.create_task(fleet.ask(request(f"r{i}", b"%d" % i))) for i in range(9)]
        while len(fleet.encoding.router.queue) < 9:
            await asyncio.sleep(0)
        for ask in asks[1:]:
            ask.cancel()
        await asyncio.wait(asks[1:])
        assert len(fleet.encoding.router.queue) == 1      # the others' files are memory that nobody counts
        fleet.supervisor.resume("encoder/0")
        assert await asks[0] == [expected(b"0")]
        await fleet.at_rest()


@pytest.mark.parametrize("manners", [{"encode_s": 0.2}, {"token_s": 0.2}])
async def test_a_stop_ends_every_request(manners):
    async with running(encoders=1, **manners) as fleet:
        asks = [asyncio.create_task(fleet.ask(request(f"r{i}", b"%d" % i, max_tokens=99))) for i in range(4)]
        while not fleet.supervisor.find("encoder/0").in_flight:
            await asyncio.sleep(0)
        await fleet.supervisor.stop()
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(answer, (NoWorker, WorkerLost)) for answer in answers)
        await fleet.at_rest()


async def test_a_stop_ends_a_request_that_waits_for_a_worker_to_come_back():
    config = Config().with_values("fleet", {"backoff_s": 100.0, "max_failures": 99}, "test")
    async with running(encoders=0, config=config) as fleet:
        worker = fleet.supervisor.find("pd/0")
        fleet.supervisor._fork_server = NoForks()
        worker.process.kill()
        while worker.process is not None or worker.state is not State.GONE:
            await asyncio.sleep(0.01)
        ask = asyncio.create_task(fleet.ask(request("r")))
        await asyncio.sleep(0)
        await fleet.supervisor.stop()
        with pytest.raises(NoWorker):
            async with asyncio.timeout(60):
                await ask


class NoForks:
    pid = None

    async def spawn(self, *args):
        raise OSError("no process")

    def stop(self):
        pass


async def test_a_request_lost_before_its_first_token_is_placed_again():
    async with running(pds=1, encode_s=0.3) as fleet:
        ask = asyncio.create_task(fleet.ask(request("r", b"a")))
        await asyncio.sleep(0.05)
        os.kill(fleet.supervisor.find("pd/0").process.pid, signal.SIGKILL)
        assert await ask == [expected(b"a")]
        await fleet.at_rest()


async def killed_while_it_answers(fleet, ask, times=1):
    """The events of `ask`; its PD worker is killed `times` times, each time once all choices have begun."""
    seen, begun = [], set()
    async for index, event in fleet.pipeline.run(ask):
        seen.append((index, event))
        begun |= {index} if isinstance(event, Tokens) else set()
        if len(begun) == ask.n and times:
            times, begun = times - 1, set()
            os.kill(fleet.supervisor.find("pd/0").process.pid, signal.SIGKILL)
    return seen


async def test_a_request_lost_after_its_first_token_is_told_so():
    async with running(token_s=0.05) as fleet:
        with pytest.raises(WorkerLost):
            await killed_while_it_answers(fleet, request("r", b"a", max_tokens=200))
        await fleet.ready()
        await fleet.at_rest()


async def test_an_answer_that_nobody_has_seen_begins_anew():
    async with running(encoders=1, token_s=0.05) as fleet:
        seen = await killed_while_it_answers(fleet, request("r", b"a", n=3, whole=True, max_tokens=9))
        at, = [i for i, (_, event) in enumerate(seen) if isinstance(event, Restarted)]
        assert {index for index, event in seen[:at] if isinstance(event, Tokens)} == {0, 1, 2}
        for index in range(3):
            told = [token for i, event in seen[at:] if i == index and isinstance(event, Tokens) for token in event.ids]
            assert [*told, "end"] == expected(b"a", max_tokens=9)
        assert fleet.supervisor.find("encoder/0").done == 1
        await fleet.at_rest()


async def test_an_answer_lost_twice_midway_is_told_so_and_is_no_poison():
    config = Config().with_values("fleet", {"backoff_s": 0.01}, "test")
    async with running(encoders=1, token_s=0.05, config=config) as fleet:
        with pytest.raises(WorkerLost):
            await killed_while_it_answers(fleet, request("r", b"a", whole=True, max_tokens=9), times=2)
        assert fleet.encoding.crashes.entries == 0
        await fleet.at_rest()


async def test_an_answer_whose_images_were_freed_cannot_start_again():
    async with running(encoders=1, token_s=0.05) as fleet:
        ask = request("r", b"a", whole=True, max_tokens=200)
        answers = fleet.pipeline.run(ask)
        while not isinstance((await anext(answers))[1], Tokens):
            pass
        ask.images.clear()      # as their owner does when others need the room
        os.kill(fleet.supervisor.find("pd/0").process.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            async for _ in answers:
                pass
        await fleet.at_rest()


@pytest.mark.parametrize("manners", [{"encode_s": 5}, {"token_s": 5}])
async def test_a_deadline_ends_a_request_at_any_stage(manners):
    async with running(encoders=1, **manners) as fleet:
        deadline = asyncio.get_running_loop().time() + 0.3
        with pytest.raises(WorkerTimeout):
            await fleet.ask(request("r", b"a", max_tokens=50, deadline=deadline))
        assert fleet.cache._entries == {} or all(e.ref_count == 0 for e in fleet.cache._entries.values())


async def test_drained_workers_get_nothing_new_and_come_back():
    async with running(encoders=2) as fleet:
        fleet.supervisor.drain("encoder/0")
        for i in range(4):
            await fleet.ask(request(f"r{i}", b"%d" % i))
        assert [worker.done for worker in fleet.supervisor.role("encoder")] == [0, 4]
        fleet.supervisor.resume("encoder/0")
        # Enough to be worth a worker that was never tried and says at its start that it is six times as slow.
        await asyncio.gather(*(fleet.ask(request(f"s{i}", b"s%d" % i)) for i in range(20)))
        assert fleet.supervisor.find("encoder/0").done > 0


async def test_with_the_only_pd_worker_out_of_rotation_requests_are_told_at_once():
    async with running(encoders=1, encode_s=0.2) as fleet:
        waits = asyncio.create_task(fleet.ask(request("r", b"a")))
        while not fleet.supervisor.find("encoder/0").in_flight:
            await asyncio.sleep(0)
        fleet.supervisor.drain("pd/0")
        with pytest.raises(NoWorker):
            with fleet.admission.admit():
                pass
        with pytest.raises(NoWorker):
            async with asyncio.timeout(60):
                await waits
        fleet.supervisor.find("pd/0").process.kill()        # it comes back, but not into rotation
        with pytest.raises(NoWorker):
            async with asyncio.timeout(60):
                await fleet.ask(request("r", b"a"))
        fleet.supervisor.resume("pd/0")
        with fleet.admission.admit():
            assert await fleet.ask(request("r", b"a")) == [expected(b"a")]
        await fleet.at_rest()


async def test_a_worker_that_cannot_start_is_given_up_and_requests_are_told():
    async with running(encoders=1, bad_start=78) as fleet:
        async with asyncio.timeout(60):
            while any(worker.state is not State.FAILED for worker in fleet.supervisor.workers):
                await asyncio.sleep(0.02)
        assert "no weights here" in fleet.supervisor.find("pd/0").last_error
        with pytest.raises(NoWorker):
            with fleet.admission.admit():
                pass
        with pytest.raises(NoWorker):
            await fleet.ask(request("r", b"a"))


async def test_a_hung_worker_is_replaced_and_its_work_placed_again():
    config = Config().with_values("fleet", {"stall_s": 1.0}, "test")
    async with running(encoders=2, hang="forever", config=config) as fleet:
        with pytest.raises(Rejected):
            await fleet.ask(request("r", b"forever"))
        assert all("signal 9" in worker.last_error for worker in fleet.supervisor.role("encoder"))
        await fleet.ready()
        assert await fleet.ask(request("next", b"ok")) == [expected(b"ok")]


async def test_a_pd_worker_that_only_decodes_is_chosen_before_one_with_a_prompt_to_read():
    async with running(pds=2, token_s=0.05) as fleet:
        answers = fleet.pipeline.run(request("long", *(b"%d" % i for i in range(8)), max_tokens=150))
        await anext(answers)        # its prompt is read: what counts is the 150 tokens left to decode
        first, second = sorted(fleet.supervisor.role("pd"), key=lambda worker: -worker.in_flight)
        assert (first.in_flight_cost, second.in_flight_cost) == (150, 0)
        prompt = len(request("x", *(b"%d" % i for i in range(8))).tokens)
        reading = asyncio.create_task(fleet.ask(request("more", *(b"%d" % i for i in range(8)), max_tokens=150)))
        while not second.in_flight:
            await asyncio.sleep(0)
        assert second.in_flight_cost == prompt + 150
        await asyncio.gather(answers.aclose(), reading)
        await fleet.at_rest()


async def test_a_second_question_goes_where_the_first_one_was():
    """Unless that worker has more to do than the beginning is long; a restarted worker has no cache."""
    pictures = [b"%d" % i for i in range(8)]
    async with running(pds=2, token_s=0.05) as fleet:
        done = {worker.name: worker for worker in fleet.supervisor.role("pd")}
        for i in range(3):
            await fleet.ask(request(f"r{i}", *pictures))
        assert sorted(worker.done for worker in done.values()) == [0, 3]
        home, other = sorted(done.values(), key=lambda worker: -worker.done)
        await fleet.ask(request("unlike", *(b"other %d" % i for i in range(8))))
        assert (home.done, other.done) == (4, 0)    # both are idle
        answers = fleet.pipeline.run(request("long", *pictures, max_tokens=100))
        await anext(answers)
        assert (home.in_flight_cost, other.in_flight_cost) == (100, 0)
        # Of 148 tokens the first two blocks are known.
        await fleet.ask(request("sticks", *pictures))
        assert (home.done, other.done) == (5, 0)
        more = fleet.pipeline.run(request("longer", *pictures, max_tokens=100))
        await anext(more)
        await fleet.ask(request("leaves", *pictures))
        assert (home.done, other.done) == (5, 1)
        await asyncio.gather(answers.aclose(), more.aclose())
        home.process.kill()
        while home.restarts == 0:
            await asyncio.sleep(0.01)
        await fleet.ready()
        await fleet.ask(request("home again", *pictures))
        assert other.done == 2
        await fleet.at_rest()


async def test_an_answer_without_a_limit_counts_as_one_of_usual_length():
    async with running(pds=2, token_s=0.05) as fleet:
        answers = fleet.pipeline.run(request("long", max_tokens=100_000))
        await anext(answers)
        assert max(worker.in_flight_cost for worker in fleet.supervisor.role("pd")) == ANSWER_TOKENS
        await answers.aclose()
        await fleet.at_rest()


async def test_a_full_arena_whose_requests_all_wait_for_a_prefill_worker_is_emptied_when_it_is_back():
    config = Config().with_values("fleet", {"backoff_s": 1.0, "min_uptime_s": 99.0}, "test")
    async with running(encoders=1, arena_bytes=4 * 4096, cache_bytes=0, config=config) as fleet:
        fleet.supervisor.find("pd/0").process.kill()
        asks = [asyncio.create_task(fleet.ask(request(f"r{i}", b"%d" % i, b"%d!" % i))) for i in range(12)]
        while fleet.cache.host.used_bytes < fleet.cache.size or not fleet.cache.waiting:
            assert not any(ask.done() for ask in asks)
            await asyncio.sleep(0)
        assert await asyncio.gather(*asks) == [[expected(b"%d" % i, b"%d!" % i)] for i in range(12)]
        await fleet.at_rest()
        assert fleet.cache.host.used_bytes == 0
