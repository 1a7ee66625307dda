"""Content that crashed workers is remembered for the right time."""

import asyncio
from dataclasses import replace

import pytest

from epdd.dispatch import crash_policy
from epdd.dispatch.crash_policy import Attempts, CrashPolicy
from epdd.dispatch.request_record import RequestRecord
from epdd.errors import MediaError, OutOfMemory, Rejected, WorkerLost
from tests.dispatch.fleet import request


def test_it_is_refused_for_a_while_and_then_tried_again():
    now = [0.0]
    known = CrashPolicy(600.0, lambda: now[0])
    known.reject_image(request("r", b"a").images[0].key)
    now[0] = 599.0
    with pytest.raises(Rejected) as caught:
        known.check(request("r", b"b", b"a"))
    assert caught.value.code == "image_rejected"
    known.check(request("r", b"b"))
    now[0] = 601.0
    known.check(request("r", b"a"))
    assert known.entries == 0 and (known.counts.images, known.counts.refused) == (1, 1)


def test_a_prompt_is_its_tokens_images_and_grammar():
    known, asked = CrashPolicy(600.0), request("r", b"a")
    known.reject_prompt(asked)
    with pytest.raises(Rejected):
        known.check(replace(asked, record=RequestRecord("other"), n=2))
    known.check(request("r", b"b"))
    known.check(replace(asked, tokens=[8, *asked.tokens[1:]]))


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(crash_policy, "KEYS_MAX", 3)
    known = CrashPolicy(600.0)
    for name in (b"a", b"b", b"c", b"d"):
        known.reject_image(request("r", name).images[0].key)
    assert known.entries == 3
    known.check(request("r", b"a"))


def lost(crashed=True):
    return WorkerLost("gone", crashed=crashed)


def test_an_image_is_tried_once_more_and_then_rejected():
    policy, attempts = CrashPolicy(600.0), Attempts(begun=1)
    assert policy.image_lost("a", attempts, lost(), wanted=True) is None
    attempts.begun = 2
    told = policy.image_lost("a", attempts, lost(), wanted=True)
    assert isinstance(told, Rejected) and policy.counts.images == 1


@pytest.mark.parametrize("crashes", [(False, False), (True, False), (False, True)])
def test_a_worker_that_was_ended_is_no_crash(crashes):
    policy, attempts = CrashPolicy(600.0), Attempts()
    for crashed in crashes:
        attempts.begun += 1
        told = policy.image_lost("a", attempts, lost(crashed), wanted=True)
    assert isinstance(told, WorkerLost) and not told.retryable and policy.entries == 0


def test_without_memory_an_image_is_tried_alone_and_other_faults_are_final():
    policy = CrashPolicy(600.0)
    assert policy.image_lost("a", Attempts(1), OutOfMemory("full"), wanted=True) is None
    for attempts, error, wanted in ((2, OutOfMemory("full"), True), (1, OutOfMemory("full"), False),
                                    (1, MediaError("bad"), True)):
        assert policy.image_lost("a", Attempts(attempts), error, wanted) is error


def test_a_prompt_that_was_answered_in_part_is_not_tried_again():
    policy, asked = CrashPolicy(600.0), request("r", b"a")
    policy.prompt_lost(asked, Attempts(1), lost(), begun=False)
    policy.prompt_lost(replace(asked, whole=True), Attempts(1), lost(), begun=True)
    for attempts, begun in ((1, True), (2, False)):
        with pytest.raises(WorkerLost):
            policy.prompt_lost(asked, Attempts(attempts), lost(), begun)
    with pytest.raises(Rejected):
        policy.prompt_lost(asked, Attempts(2, crashes=1), lost(), begun=False)
    assert policy.counts.prompts == 1


async def test_prompts_with_a_crash_behind_them_go_one_by_one():
    policy = CrashPolicy(600.0)
    first, second, fresh = (policy.isolation(Attempts(1, crashes)) for crashes in (1, 1, 0))
    await first.begin()
    await fresh.begin()
    waits = asyncio.create_task(second.begin())
    await asyncio.sleep(0)
    assert policy.isolating and not waits.done()
    fresh.end()
    first.end()
    first.end()
    await waits
    assert policy.isolating
    second.end()
    assert not policy.isolating
