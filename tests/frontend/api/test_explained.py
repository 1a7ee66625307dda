"""What the frontend writes in a request's record: ids, arrival, and that an answer ended before its work."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from epdd.dispatch.history import History
from epdd.dispatch.request import Request
from tests.frontend.bench import Bench, hosted, settle


@hosted()
async def test_ids_and_arrival(bench: Bench) -> None:
    before = time.monotonic()
    answer = await bench.http.post(f"{bench.url}/v1/chat/completions", headers={"X-Request-ID": "mine/7 "},
                                   json={"messages": [{"role": "user", "content": "hello"}]})
    request = bench.script.requests[0]
    assert request.id == (await answer.json())["id"]
    assert request.record.client_id == answer.headers["x-request-id"] == "mine7"
    assert before <= request.record.arrived <= time.monotonic()
    answer = await bench.chat()
    request = bench.script.requests[1]
    assert request.id == answer.headers["x-request-id"] == (await answer.json())["id"]
    assert request.record.client_id == ""


@hosted()
async def test_a_stop_string_is_no_abort(bench: Bench) -> None:
    """Both close the pipeline before its end."""
    history, play = History(), bench.script.say("hello world hello", hang=True)

    async def recorded(request: Request) -> AsyncIterator[Any]:
        with history.record(request):
            async for event in play(request):
                yield event

    bench.script.play = recorded
    for stream in (True, False):
        answer = await bench.chat(stop=["world"], stream=stream)
        assert '"finish_reason":"stop"' in await answer.text()
    answer = await bench.chat(stream=True)
    await answer.content.readline()
    answer.close()
    await settle(lambda: history.last()[0]["outcome"] != "running")
    assert [each["outcome"] for each in history.last()] == ["aborted", "completed", "completed"]
