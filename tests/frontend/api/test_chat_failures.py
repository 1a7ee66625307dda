"""Chat requests that fail, end early, or whose clients leave: the answers, and that nothing is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from epdd.dispatch.pipeline import Restarted
from epdd.dispatch.request import Request
from epdd.errors import (ArenaFull, BadRequest, EpddError, MediaError, NoWorker, Overloaded, ProtocolError, Rejected,
                         WorkerFailed, WorkerLost, WorkerTimeout)
from epdd.frontend.context import AnswerEvent
from epdd.wire import Done, Prefilled, Tokens

from tests.frontend.bench import Bench, events, hosted, settle, texts
from tests.frontend.images.pictures import asking, picture


ERRORS: list[tuple[EpddError, int, str, str, str | None]] = [
    (MediaError("bad pixels", code="image_parse_error"), 400, "invalid_request_error", "image_parse_error", None),
    (BadRequest("no"), 400, "invalid_request_error", "invalid_request", None),
    (Rejected("died", code="image_rejected"), 400, "invalid_request_error", "image_rejected", None),
    (Rejected("died"), 400, "invalid_request_error", "prompt_rejected", None),
    (ArenaFull("full"), 503, "server_error", "arena_full", "1"),
    (NoWorker("none"), 503, "server_error", "no_worker", "5"),
    (Overloaded("many"), 429, "rate_limit_error", "overloaded", "1"),
    (WorkerLost("gone"), 503, "server_error", "worker_lost", "1"),
    (WorkerTimeout("late"), 504, "server_error", "timeout", None),
    (WorkerFailed("broke"), 500, "server_error", "worker_failed", None),
    (ProtocolError("garbage"), 500, "server_error", "protocol_error", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "code", "retry"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
def test_failures_before_the_first_token_have_their_status(family: Any, stream: bool, error: EpddError, status: int,
                                                           kind: str, code: str, retry: str | None) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        bench.script.play = bench.script.say("", fail=error)
        answer = await bench.chat(stream=stream)
        assert answer.status == status and answer.headers.get("Retry-After") == retry
        assert answer.headers["Content-Type"].startswith("application/json") and answer.headers["x-request-id"]
        assert await answer.json() == {"error": {"message": error.message, "type": kind, "param": None, "code": code}}

    test(family)


@hosted()
async def test_a_failure_after_the_first_token_is_a_frame(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello", fail=WorkerLost("the worker ended"))
    frames = await bench.frames()
    assert texts(frames[:-2]) == "hello"
    assert frames[-2:] == [{"error": {"message": "the worker ended", "type": "server_error", "param": None,
                                      "code": "worker_lost"}}, "[DONE]"]
    assert all(choice["finish_reason"] is None for frame in frames[:-2] for choice in frame["choices"])
    counts = bench.context.stats.counts
    assert (counts["failed"], counts["completed"]) == (1, 0)
    assert bench.context.stats.errors == {"worker_lost": 1}
    assert (await bench.chat()).status == 503       # not streamed: a real status


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_tells_nothing(family: Any, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        async def play(request: Request) -> AsyncIterator[AnswerEvent]:
            raise ZeroDivisionError("secret /etc/path 0x7f00")
            yield

        bench.script.play = play
        answer = await bench.http.post(f"{bench.url}/v1/chat/completions", headers={"X-Request-ID": "mine-7"},
                                       json={"messages": [{"role": "user", "content": "x"}], "stream": stream})
        text = await answer.text()
        assert answer.status == 500 and "secret" not in text and "Traceback" not in text
        assert json.loads(text)["error"]["code"] == "internal_error"

    test(family)
    record, = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "mine-7" in record.getMessage() and record.exc_info and "secret" in str(record.exc_info[1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(family: Any, stream: bool) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        bench.script.play = bench.script.say("hello", hang=True)
        task = asyncio.create_task(bench.chat(stream=stream))
        await settle(lambda: bool(bench.script.requests))
        if stream:
            answer = await task
            await answer.content.readuntil(b"\n\n")
            answer.close()
        else:
            task.cancel()
        await settle(lambda: bench.script.closed == 1 and bench.door.in_flight == 0)
        stats = bench.context.stats
        assert (stats.counts["aborted"], stats.running, stats.counts["failed"]) == (1, 0, 0)
        bench.script.play = bench.script.say("still here")
        assert (await bench.chat()).status == 200

    test(family)


@hosted(media={"fetch": "allowlist", "allow": ("127.0.0.1",), "timeout_s": 30.0})
async def test_a_client_that_leaves_ends_its_fetch(bench: Bench) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        while await reader.read(100):
            pass
        left.set()
        writer.close()

    connected, left = asyncio.Event(), asyncio.Event()
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/a.png"}}
    task = asyncio.create_task(bench.chat(messages=asking(part)))
    await connected.wait()
    assert (await bench.chat()).status == 200       # text is not held up
    task.cancel()
    await left.wait()
    await settle(lambda: bench.door.in_flight == 0)
    assert bench.context.stats.counts["aborted"] == 1
    server.close()


@hosted(server={"timeout_s": 0.3})
async def test_the_deadline_before_and_after_the_first_token(bench: Bench) -> None:
    bench.script.play = bench.script.say("", hang=True)
    answer = await bench.chat(stream=True)
    assert answer.status == 504 and (await answer.json())["error"]["code"] == "timeout"
    bench.script.play = bench.script.say("hello", hang=True)
    frames = await bench.frames()
    assert texts(frames[:-2]) == "hello" and frames[-2]["error"]["code"] == "timeout"
    assert bench.script.closed == 2
    loop = asyncio.get_running_loop()
    assert 0 < loop.time() - bench.script.requests[-1].deadline < 5


@hosted(server={"timeout_s": 0.5})
async def test_a_reader_that_stops_reading_does_not_hold_its_request(bench: Bench) -> None:
    async def play(request: Request) -> AsyncIterator[AnswerEvent]:
        while True:
            await asyncio.sleep(0)
            yield 0, Tokens(request.id, tokens)

    bench.script.play = play
    tokens = tuple(bench.script.tokenizer.encode("x" * 20_000).ids)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(bench.url.rpartition(":")[2]), limit=1000)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await settle(lambda: bench.script.closed == 1, 60)
    await settle(lambda: bench.door.in_flight == 0, 60)
    assert bench.context.stats.counts["failed"] + bench.context.stats.counts["aborted"] == 1
    writer.close()


@hosted()
async def test_admission(bench: Bench) -> None:
    bench.door.refuse = Overloaded("too many")
    answer = await bench.chat()
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    bench.door.refuse = None
    bench.door.refuse_late = BadRequest("never fits")
    assert (await bench.chat()).status == 400
    assert bench.script.requests == [] and bench.door.in_flight == 0
    counts = bench.context.stats.counts
    assert (counts["accepted"], counts["rejected"]) == (1, 2)


@hosted()
async def test_context_and_images(bench: Bench) -> None:
    answer = await bench.chat(messages=asking("hello " * 5000))
    error = (await answer.json())["error"]
    assert answer.status == 400 and error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 4096 tokens. However, ")
    wide = [picture(size=(700, 700)) for _ in range(16)]        # 256 rows each fill the context
    answer = await bench.chat(messages=asking(*wide))
    assert (await answer.json())["error"]["code"] == "context_length_exceeded"
    answer = await bench.chat(messages=asking(*[picture()] * 17))
    assert "holds 17 images; at most 16" in (await answer.json())["error"]["message"]
    hello = {"type": "image_url", "image_url": "data:image/png;base64,aGVsbG8="}
    answer = await bench.chat(messages=asking("x", hello))
    assert (await answer.json())["error"] == {
        "message": "The image is in no known format; send JPEG, PNG, WebP, GIF or BMP",
        "type": "invalid_request_error", "param": "messages[0].content[1]", "code": "invalid_image_format"}
    assert bench.script.requests == []


@hosted()
async def test_image_files_of_a_stream_are_let_go_at_the_first_token(bench: Bench) -> None:
    sizes: list[int] = []

    async def play(request: Request) -> AsyncIterator[AnswerEvent]:
        sizes.append(len(request.images))
        yield 0, Prefilled(request.id)
        sizes.append(len(request.images))
        yield 0, Tokens(request.id, (5,))
        sizes.append(len(request.images))
        yield 0, Done(request.id, "length")

    bench.script.play = play
    fields = {"messages": asking(picture(), picture("blue")), "stream_options": {"include_usage": True}}
    frames = await bench.frames(**fields)
    assert sizes == [2, 2, 0]
    assert frames[-2]["usage"]["prompt_tokens_details"]["image_tokens"] == 8


@hosted()
async def test_after_many_faults_nothing_is_left(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello", fail=WorkerFailed("x"))
    for _ in range(20):
        await asyncio.gather(bench.chat(stream=True), bench.chat(), bench.chat(n=0), bench.chat(messages=asking(
            picture(), {"type": "image_url", "image_url": "data:,"})))
    bench.script.play = bench.script.say("ok")
    assert (await bench.chat(messages=asking(picture()))).status == 200
    stats = bench.context.stats
    assert stats.running == bench.door.in_flight == 0
    assert sum(stats.counts[name] for name in ("completed", "failed", "rejected", "aborted")) == 81


@pytest.mark.parametrize("stream", [False, True])
def test_a_pipeline_that_ends_early_is_a_fault(family: Any, stream: bool) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        async def play(request: Request) -> AsyncIterator[AnswerEvent]:
            yield 0, Prefilled(request.id)

        bench.script.play = play
        answer = await bench.chat(stream=stream)
        assert answer.status == 500 and (await answer.json())["error"]["code"] == "internal_error"

    test(family)


@hosted()
async def test_equal_client_ids_are_two_requests(bench: Bench) -> None:
    async def ask() -> tuple[str, str]:
        answer = await bench.http.post(f"{bench.url}/v1/chat/completions", headers={"X-Request-ID": "same"},
                                       json={"messages": [{"role": "user", "content": "x"}]})
        return answer.headers["x-request-id"], (await answer.json())["id"]

    first, second = await asyncio.gather(ask(), ask())
    assert first[0] == second[0] == "same" and first[1] != second[1]


def test_events_helper_is_strict() -> None:
    for text in ("data:x\n\ndata: [DONE]\n\n", ": ping\n\ndata: [DONE]\n\n", "data: 1\n\n", "data: [DONE]\n"):
        with pytest.raises((AssertionError, ValueError)):
            events(text)


@hosted()
async def test_a_whole_answer_that_begins_anew_holds_nothing_of_what_was_lost(bench: Bench) -> None:
    kept: list[int] = []

    async def play(request: Request) -> AsyncIterator[AnswerEvent | tuple[int, Restarted]]:
        assert request.whole
        ids = bench.script.tokenizer.encode("red", add_special_tokens=False).ids
        yield 0, Prefilled(request.id, 5)
        for choice in (0, 1):
            yield choice, Tokens(request.id, tuple(bench.script.tokenizer.encode("lost words").ids))
        yield 1, Done(request.id, "length")
        kept.append(len(request.images))
        yield 0, Restarted()
        yield 0, Prefilled(request.id, 9)
        for choice in (0, 1):
            yield choice, Tokens(request.id, tuple(ids))
            yield choice, Done(request.id, "stop", 1)

    bench.script.play = play        # type: ignore[assignment]
    answer = await bench.chat(n=2, messages=asking(picture()))
    body = await answer.json()
    assert [(choice["message"]["content"], choice["finish_reason"]) for choice in body["choices"]] == [
        ("red", "stop"), ("red", "stop")]
    ids = bench.script.tokenizer.encode("red", add_special_tokens=False).ids
    assert body["usage"]["completion_tokens"] == 2 * (len(ids) + 1)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 9
    assert kept == [1]              # the images are there for the second try
    assert bench.context.stats.gauges["images"]() == 0
