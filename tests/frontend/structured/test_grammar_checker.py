"""The process that compiles grammars: too slow ones, crashes, and concurrent requests."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from epdd.errors import CapacityError
from epdd.frontend.structured import structured_output
from epdd.frontend.structured.grammar_checker import GrammarChecker

from tests.frontend.bench import Bench, hosted, settle

GOOD, BAD = 'start: "a"', "start: b"
# Two kilobytes, and hours of work: to llguidance it is the intersection of 30 expressions of 8,192 states each.
ENDLESS = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{12}}{at}"} for at in range(30)]}
TANGLED = "root ::= " + "x " * 2000 + "\n" + "".join(     # 15 s of work, and then a fault
    f"{name} ::= " + f"{below} " * 800 + "\n" for name, below in zip("xyzabcd", "yzabcde")) + 'e ::= "q"'


def checked(test: Callable[[GrammarChecker], Awaitable[None]]) -> None:
    async def run() -> None:
        checker = GrammarChecker()
        try:
            async with asyncio.timeout(100):
                await test(checker)
        finally:
            await checker.close()

    uvloop.run(run())


def term(**fields: Any) -> str:
    return structured_output.parse(fields).grammar


@pytest.mark.parametrize("fields", [{"guided_json": ENDLESS}, {"guided_grammar": TANGLED}], ids=["schema", "rules"])
def test_what_takes_too_long_is_ended(fields: dict[str, Any]) -> None:
    """By CPU time, whatever else runs; the daemon's own thread does none of the work."""
    async def test(checker: GrammarChecker) -> None:
        began = time.thread_time()
        for _ in range(2):      # the second is known
            assert await checker.fault([GOOD, term(**fields)]) == (1, "it takes too long to compile")
        assert time.thread_time() - began < 0.5
        assert await checker.fault([GOOD]) == (-1, "")

    checked(test)


def test_all_of_a_request_have_the_time_of_one() -> None:
    """128 schemas that each take just less than the limit would take two minutes."""
    slow = term(guided_grammar="root ::= " + ("(" * 23 + '"a"' + "){2}" * 23) * 60)

    async def test(checker: GrammarChecker) -> None:
        place, fault = await checker.fault([f"{slow}\nrule{at}_: \"x\"" for at in range(128)])
        assert (place, fault) == (127, "it takes too long to compile")

    checked(test)


def test_the_daemons_signals_do_not_end_it() -> None:
    async def test(checker: GrammarChecker) -> None:
        assert await checker.fault([GOOD]) == (-1, "")
        process = checker._process
        assert process is not None
        for number in (signal.SIGHUP, signal.SIGUSR1):
            process.send_signal(number)
        assert (await checker.fault([BAD]))[0] == 0
        assert checker._process is process and process.returncode is None

    checked(test)


def test_which_one_is_at_fault() -> None:
    async def test(checker: GrammarChecker) -> None:
        place, fault = await checker.fault([GOOD, GOOD, BAD, BAD])
        assert place == 2 and "b" in fault and len(fault) < 200
        assert await checker.fault(["start: /(?P<\n\u2028é/"]) != (-1, "")

    checked(test)


def test_a_client_that_leaves_takes_no_answer_from_the_next() -> None:
    async def test(checker: GrammarChecker) -> None:
        leaving = [asyncio.create_task(checker.fault([term(guided_grammar=TANGLED) + f"\nX{at}: \"x\""]))
                   for at in range(3)]
        await settle(lambda: checker._process is not None)
        for task in leaving:
            task.cancel()
        assert await checker.fault([BAD]) != (-1, "") and await checker.fault([GOOD]) == (-1, "")
        assert [task.cancelled() for task in leaving] == [True] * 3

    checked(test)


def test_its_process_dies_and_is_there_again() -> None:
    async def test(checker: GrammarChecker) -> None:
        assert await checker.fault([GOOD]) == (-1, "")
        process = checker._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert await checker.fault([GOOD + " GOOD\nGOOD: /x/"]) == (-1, "")
        again = checker._process
        assert again is not None and again.pid != process.pid

    checked(test)


def test_no_process_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")

    async def test(checker: GrammarChecker) -> None:
        with pytest.raises(CapacityError, match="try again"):
            await checker.fault([GOOD])

    checked(test)


@hosted()
async def test_others_are_answered_meanwhile(bench: Bench) -> None:
    """Two of these must not block both threads that read large bodies."""
    asked = [asyncio.create_task(bench.chat(guided_json={**ENDLESS, "title": str(at)})) for at in range(3)]
    answer = await bench.chat(user="x" * 70_000)        # so large a body is read in one of those threads
    assert answer.status == 200 and not any(task.done() for task in asked[1:])
    for task in asked:
        answer = await task
        assert answer.status == 400
        assert (await answer.json())["error"]["message"] == "guided_json: it takes too long to compile"
    answer = await bench.chat(guided_regex="a|b")
    assert answer.status == 200, await answer.text()
