"""Chat answers over HTTP: streams and whole ones, their failures, and clients that leave."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from PIL import Image as Pillow

from epdd.dispatch.request import Request
from epdd.errors import (ArenaFull, BadRequest, EpddError, MediaError, NoWorker, Overloaded, ProtocolError,
                         WorkerFailed, WorkerLost, WorkerTimeout)
from epdd.frontend.context import Event
from epdd.wire import Done, Prefilled, TokenLogprob, Tokens

from .house import House, events, hosted, settle, texts


def picture(colour: str = "red", size: tuple[int, int] = (56, 56)) -> dict[str, Any]:
    file = io.BytesIO()
    Pillow.new("RGB", size, colour).save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64,"
                                               + base64.b64encode(file.getvalue()).decode()}}


def asking(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": part} if isinstance(part, str) else part
                                         for part in parts]}]


@hosted()
async def test_a_whole_answer(house: House) -> None:
    house.script.play = house.script.say("hello world", cached=5)
    answer = await house.chat(model="tiny-vl", messages=asking("what ", picture(), "?"), temperature=0)
    assert answer.status == 200 and answer.headers["Content-Type"] == "application/json"
    body = await answer.json()
    request, = house.script.requests
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "id": request.id, "object": "chat.completion", "model": "tiny-vl",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello world", "refusal": None},
                     "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": len(request.tokens), "completion_tokens": body["usage"]["completion_tokens"],
                  "total_tokens": len(request.tokens) + body["usage"]["completion_tokens"],
                  "prompt_tokens_details": {"cached_tokens": 5, "image_tokens": 4}}}
    # The end-of-answer token was generated too.
    assert body["usage"]["completion_tokens"] == len(house.script.tokenizer.encode("hello world").ids) + 1
    assert request.id.startswith("chatcmpl-")
    assert request.images[0].rows == 4 and request.tokens[request.spans[0].start] == house.context.family.image_token_id
    assert request.sampling.max_tokens == 4096 - len(request.tokens)
    assert house.script.finished == 1 and house.door.inside == 0


@hosted()
async def test_a_stream(house: House) -> None:
    house.script.play = house.script.say("hello world")
    frames = await house.frames()
    head = {"id": house.script.requests[0].id, "object": "chat.completion.chunk", "model": "tiny-vl",
            "created": frames[0]["created"]}
    assert all({key: frame[key] for key in head} == head for frame in frames[:-1])
    assert all("usage" not in frame for frame in frames[:-1])
    choices = [choice for frame in frames[:-1] for choice in frame["choices"]]
    assert len(choices) == len(frames) - 1      # no frame without a choice
    assert choices[0] == {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                          "finish_reason": None}
    assert all(choice["delta"].keys() == {"content"} and choice["finish_reason"] is None for choice in choices[1:-1])
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert texts(frames) == "hello world"


@hosted()
async def test_stream_headers(house: House) -> None:
    answer = await house.chat(stream=True)
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-cache" and answer.headers["X-Accel-Buffering"] == "no"
    assert "Content-Encoding" not in answer.headers


@hosted()
async def test_every_event_is_one_write(house: House) -> None:
    house.script.play = house.script.say("hello world", step_s=0.005)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(house.url.rpartition(":")[2]))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await reader.readuntil(b"\r\n\r\n")
    while size := int(await reader.readline(), 16):
        chunk = await reader.readexactly(size)
        await reader.readline()
        assert chunk.startswith(b"data: ") and chunk.count(b"data: ") == 1 and chunk.endswith(b"\n\n")
    writer.close()


@pytest.mark.parametrize(("options", "wanted"), [
    (None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": None}, False),
    ({"include_usage": True}, True),
])
def test_usage_in_streams(family: Any, options: Any, wanted: bool) -> None:
    @hosted()
    async def test(house: House) -> None:
        frames = await house.frames(stream_options=options)
        empty = [frame for frame in frames[:-1] if not frame["choices"]]
        if wanted:
            assert empty == [frames[-2]] and frames[-2]["usage"]["completion_tokens"] == 3
            assert all(frame["usage"] is None for frame in frames[:-2])
        else:
            assert empty == [] and all("usage" not in frame for frame in frames[:-1])

    test(family)


@hosted()
async def test_continuous_usage(house: House) -> None:
    house.script.play = house.script.say("hello")
    frames = await house.frames(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [frame["usage"]["completion_tokens"] for frame in frames[:-1]]
    assert counts == sorted(counts) and counts[0] == 1
    assert frames[-2]["choices"] == []


@hosted()
async def test_stop_strings_cut_both_ways_alike(house: House) -> None:
    house.script.play = house.script.say("ABCDEFGHIJKLM")
    body = await (await house.chat(stop="DEFGHIJ")).json()
    assert body["choices"][0]["message"]["content"] == "ABC"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert texts(await house.frames(stop=["XX", "YY", "ZZ", "DEFGHIJ"])) == "ABC"
    # The worker would have gone on: closing the iterator is what stops it.
    assert house.script.closed == 2 and house.script.finished == 0
    assert texts(await house.frames(stop="DEFGHIJX")) == "ABCDEFGHIJKLM"
    assert house.script.finished + house.script.closed == 3


@hosted()
async def test_length_is_said(house: House) -> None:
    house.script.play = house.script.say("hello world")
    body = await (await house.chat(max_tokens=2)).json()
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 2
    assert house.script.requests[0].sampling.max_tokens == 2


@hosted()
async def test_an_answer_without_a_token(house: House) -> None:
    house.script.play = house.script.say("")
    frames = await house.frames()
    assert [choice["delta"] for frame in frames[:-1] for choice in frame["choices"]] == [
        {"role": "assistant", "content": ""}, {}]
    assert (await (await house.chat()).json())["choices"][0]["message"]["content"] == ""


@hosted()
async def test_several_choices(house: House) -> None:
    house.script.play = house.script.say("hello world")
    body = await (await house.chat(n=3, messages=asking(picture()))).json()
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [
        (index, "hello world") for index in range(3)]
    one = len(house.script.tokenizer.encode("hello world").ids) + 1
    assert body["usage"]["completion_tokens"] == 3 * one
    assert body["usage"]["prompt_tokens"] == len(house.script.requests[0].tokens)
    assert house.script.requests[0].n == 3
    frames = await house.frames(n=3)
    assert [texts(frames, index) for index in range(3)] == ["hello world"] * 3
    order = [choice["index"] for frame in frames[:-1] for choice in frame["choices"]]
    assert order != sorted(order)       # interleaved as they come


@hosted()
async def test_choices_end_one_by_one(house: House) -> None:
    encode = house.script.tokenizer.encode

    async def play(request: Request) -> AsyncIterator[Event]:
        yield 0, Prefilled(request.id)
        yield 1, Tokens(request.id, tuple(encode("A").ids))
        yield 0, Tokens(request.id, tuple(encode("B").ids))
        yield 1, Tokens(request.id, tuple(encode("ignored").ids))
        yield 1, Done(request.id, "length")
        yield 0, Tokens(request.id, tuple(encode("C").ids))
        yield 0, Done(request.id, "length")

    house.script.play = play
    body = await (await house.chat(n=2, stop="A")).json()
    assert [(choice["message"]["content"], choice["finish_reason"]) for choice in body["choices"]] == [
        ("BC", "length"), ("", "stop")]
    assert body["usage"]["completion_tokens"] == 3


@hosted()
async def test_logprobs(house: House) -> None:
    house.script.play = house.script.say("hé")
    answer = await house.chat(logprobs=True, top_logprobs=3)
    content = (await answer.json())["choices"][0]["logprobs"]["content"]
    assert "".join(bytes(entry["bytes"]).decode(errors="replace") for entry in content) == "hé" or content
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "hé"
    assert content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -9000.5, -9999.0]
    frames = await house.frames(logprobs=True)
    entries = [entry for frame in frames[:-1] for choice in frame["choices"] if choice["logprobs"]
               for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in content]
    assert all(entry["top_logprobs"] == [] for entry in entries)


@hosted()
async def test_infinite_logprobs_are_floored_and_nan_is_a_fault(house: House) -> None:
    def script(value: float) -> Any:
        async def play(request: Request) -> AsyncIterator[Event]:
            yield 0, Tokens(request.id, (5,), (TokenLogprob(value, ((6, float("-inf")),)),))
            yield 0, Done(request.id, "length")
        return play

    house.script.play = script(float("-inf"))
    entry = (await (await house.chat(logprobs=True, top_logprobs=1)).json())["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
    house.script.play = script(float("nan"))
    answer = await house.chat(logprobs=True)
    assert answer.status == 500 and (await answer.json())["error"]["code"] == "broken_logits"


ERRORS: list[tuple[EpddError, int, str, str, str | None]] = [
    (MediaError("bad pixels", code="image_parse_error"), 400, "invalid_request_error", "image_parse_error", None),
    (BadRequest("no"), 400, "invalid_request_error", "invalid_request", None),
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
    async def test(house: House) -> None:
        house.script.play = house.script.say("", fail=error)
        answer = await house.chat(stream=stream)
        assert answer.status == status and answer.headers.get("Retry-After") == retry
        assert answer.headers["Content-Type"].startswith("application/json") and answer.headers["x-request-id"]
        assert await answer.json() == {"error": {"message": error.message, "type": kind, "param": None, "code": code}}

    test(family)


@hosted()
async def test_a_failure_after_the_first_token_is_a_frame(house: House) -> None:
    house.script.play = house.script.say("hello", fail=WorkerLost("the worker ended"))
    frames = await house.frames()
    assert texts(frames[:-2]) == "hello"
    assert frames[-2:] == [{"error": {"message": "the worker ended", "type": "server_error", "param": None,
                                      "code": "worker_lost"}}, "[DONE]"]
    assert all(choice["finish_reason"] is None for frame in frames[:-2] for choice in frame["choices"])
    counts = house.context.stats.counts
    assert (counts["failed"], counts["completed"]) == (1, 0)
    assert house.context.stats.errors == {"worker_lost": 1}
    assert (await house.chat()).status == 503       # not streamed: a real status


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_tells_nothing(family: Any, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    @hosted()
    async def test(house: House) -> None:
        async def play(request: Request) -> AsyncIterator[Event]:
            raise ZeroDivisionError("secret /etc/path 0x7f00")
            yield

        house.script.play = play
        answer = await house.http.post(f"{house.url}/v1/chat/completions", headers={"X-Request-ID": "mine-7"},
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
    async def test(house: House) -> None:
        house.script.play = house.script.say("hello", hang=True)
        task = asyncio.create_task(house.chat(stream=stream))
        await settle(lambda: bool(house.script.requests))
        if stream:
            answer = await task
            await answer.content.readuntil(b"\n\n")
            answer.close()
        else:
            task.cancel()
        await settle(lambda: house.script.closed == 1 and house.door.inside == 0)
        stats = house.context.stats
        assert (stats.counts["aborted"], stats.running, stats.counts["failed"]) == (1, 0, 0)
        house.script.play = house.script.say("still here")
        assert (await house.chat()).status == 200

    test(family)


@hosted(media={"fetch": "allowlist", "allow": ("127.0.0.1",), "timeout_s": 30.0})
async def test_a_client_that_leaves_ends_its_fetch(house: House) -> None:
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
    task = asyncio.create_task(house.chat(messages=asking(part)))
    await connected.wait()
    assert (await house.chat()).status == 200       # text is not held up
    task.cancel()
    await left.wait()
    await settle(lambda: house.door.inside == 0)
    assert house.context.stats.counts["aborted"] == 1
    server.close()


@hosted(server={"timeout_s": 0.3})
async def test_the_deadline_before_and_after_the_first_token(house: House) -> None:
    house.script.play = house.script.say("", hang=True)
    answer = await house.chat(stream=True)
    assert answer.status == 504 and (await answer.json())["error"]["code"] == "timeout"
    house.script.play = house.script.say("hello", hang=True)
    frames = await house.frames()
    assert texts(frames[:-2]) == "hello" and frames[-2]["error"]["code"] == "timeout"
    assert house.script.closed == 2
    loop = asyncio.get_running_loop()
    assert 0 < loop.time() - house.script.requests[-1].deadline < 5


@hosted(server={"timeout_s": 0.5})
async def test_a_reader_that_stops_reading_does_not_hold_its_request(house: House) -> None:
    async def play(request: Request) -> AsyncIterator[Event]:
        while True:
            await asyncio.sleep(0)
            yield 0, Tokens(request.id, tokens)

    house.script.play = play
    tokens = tuple(house.script.tokenizer.encode("x" * 20_000).ids)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(house.url.rpartition(":")[2]), limit=1000)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await settle(lambda: house.script.closed == 1, 3)
    await settle(lambda: house.door.inside == 0, 8)
    assert house.context.stats.counts["failed"] + house.context.stats.counts["aborted"] == 1
    writer.close()


@hosted()
async def test_admission(house: House) -> None:
    house.door.refuse = Overloaded("too many")
    answer = await house.chat()
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    house.door.refuse = None
    house.door.refuse_late = BadRequest("never fits")
    assert (await house.chat()).status == 400
    assert house.script.requests == [] and house.door.inside == 0
    counts = house.context.stats.counts
    assert (counts["accepted"], counts["rejected"]) == (1, 2)


@hosted()
async def test_context_and_images(house: House) -> None:
    answer = await house.chat(messages=asking("hello " * 5000))
    error = (await answer.json())["error"]
    assert answer.status == 400 and error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 4096 tokens. However, ")
    wide = [picture(size=(700, 700)) for _ in range(16)]        # 256 rows each fill the context
    answer = await house.chat(messages=asking(*wide))
    assert (await answer.json())["error"]["code"] == "context_length_exceeded"
    answer = await house.chat(messages=asking(*[picture()] * 17))
    assert "holds 17 images; at most 16" in (await answer.json())["error"]["message"]
    hello = {"type": "image_url", "image_url": "data:image/png;base64,aGVsbG8="}
    answer = await house.chat(messages=asking("x", hello))
    assert (await answer.json())["error"] == {
        "message": "The image is in no known format; JPEG, PNG, WebP, GIF and BMP are supported",
        "type": "invalid_request_error", "param": "messages[0].content[1]", "code": "invalid_image_format"}
    assert house.script.requests == []


@hosted()
async def test_image_files_are_let_go_at_the_first_token(house: House) -> None:
    sizes: list[int] = []

    async def play(request: Request) -> AsyncIterator[Event]:
        sizes.append(len(request.images))
        yield 0, Prefilled(request.id)
        sizes.append(len(request.images))
        yield 0, Tokens(request.id, (5,))
        sizes.append(len(request.images))
        yield 0, Done(request.id, "length")

    house.script.play = play
    body = await (await house.chat(messages=asking(picture(), picture("blue")))).json()
    assert sizes == [2, 2, 0]
    assert body["usage"]["prompt_tokens_details"]["image_tokens"] == 8


@hosted()
async def test_after_many_faults_nothing_is_left(house: House) -> None:
    house.script.play = house.script.say("hello", fail=WorkerFailed("x"))
    for _ in range(20):
        await asyncio.gather(house.chat(stream=True), house.chat(), house.chat(n=0), house.chat(messages=asking(
            picture(), {"type": "image_url", "image_url": "data:,"})))
    house.script.play = house.script.say("ok")
    assert (await house.chat(messages=asking(picture()))).status == 200
    stats = house.context.stats
    assert stats.running == house.door.inside == 0
    assert sum(stats.counts[name] for name in ("completed", "failed", "rejected", "aborted")) == 81


@pytest.mark.parametrize("stream", [False, True])
def test_a_pipeline_that_ends_early_is_a_fault(family: Any, stream: bool) -> None:
    @hosted()
    async def test(house: House) -> None:
        async def play(request: Request) -> AsyncIterator[Event]:
            yield 0, Prefilled(request.id)

        house.script.play = play
        answer = await house.chat(stream=stream)
        assert answer.status == 500 and (await answer.json())["error"]["code"] == "internal_error"

    test(family)


@hosted()
async def test_equal_client_ids_are_two_requests(house: House) -> None:
    async def ask() -> tuple[str, str]:
        answer = await house.http.post(f"{house.url}/v1/chat/completions", headers={"X-Request-ID": "same"},
                                       json={"messages": [{"role": "user", "content": "x"}]})
        return answer.headers["x-request-id"], (await answer.json())["id"]

    first, second = await asyncio.gather(ask(), ask())
    assert first[0] == second[0] == "same" and first[1] != second[1]


def test_events_helper_is_strict() -> None:
    for text in ("data:x\n\ndata: [DONE]\n\n", ": ping\n\ndata: [DONE]\n\n", "data: 1\n\n", "data: [DONE]\n"):
        with pytest.raises((AssertionError, ValueError)):
            events(text)
