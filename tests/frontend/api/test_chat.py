"""Chat answers over HTTP: whole ones and streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from epdd.dispatch.request import Request
from epdd.frontend.context import AnswerEvent
from epdd.wire import Done, Prefilled, TokenLogprob, Tokens

from tests.frontend.bench import Bench, hosted, texts
from tests.frontend.images.pictures import asking, picture


@hosted()
async def test_a_whole_answer(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello world", cached=5)
    answer = await bench.chat(model="tiny-vl", messages=asking("what ", picture(), "?"), temperature=0)
    assert answer.status == 200 and answer.headers["Content-Type"] == "application/json"
    body = await answer.json()
    request, = bench.script.requests
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "id": request.id, "object": "chat.completion", "model": "tiny-vl",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello world", "refusal": None},
                     "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": len(request.tokens), "completion_tokens": body["usage"]["completion_tokens"],
                  "total_tokens": len(request.tokens) + body["usage"]["completion_tokens"],
                  "prompt_tokens_details": {"cached_tokens": 5, "image_tokens": 4},
                  "completion_tokens_details": {"reasoning_tokens": 0}}}     # the template knows </think>
    # The end-of-answer token was generated too.
    assert body["usage"]["completion_tokens"] == len(bench.script.tokenizer.encode("hello world").ids) + 1
    assert request.id.startswith("chatcmpl-")
    assert request.images[0].rows == 4 and request.tokens[request.spans[0].start] == bench.context.family.image_token_id
    assert request.sampling.max_tokens == 4096 - len(request.tokens)
    assert bench.script.finished == 1 and bench.door.in_flight == 0


@hosted()
async def test_a_stream(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello world")
    frames = await bench.frames()
    head = {"id": bench.script.requests[0].id, "object": "chat.completion.chunk", "model": "tiny-vl",
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
async def test_stream_headers(bench: Bench) -> None:
    answer = await bench.chat(stream=True)
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-cache" and answer.headers["X-Accel-Buffering"] == "no"
    assert "Content-Encoding" not in answer.headers


@hosted()
async def test_every_event_is_one_write(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello world", step_s=0.005)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(bench.url.rpartition(":")[2]))
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
    async def test(bench: Bench) -> None:
        frames = await bench.frames(stream_options=options)
        empty = [frame for frame in frames[:-1] if not frame["choices"]]
        if wanted:
            assert empty == [frames[-2]] and frames[-2]["usage"]["completion_tokens"] == 3
            assert all(frame["usage"] is None for frame in frames[:-2])
        else:
            assert empty == [] and all("usage" not in frame for frame in frames[:-1])

    test(family)


@hosted()
async def test_continuous_usage(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello")
    frames = await bench.frames(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [frame["usage"]["completion_tokens"] for frame in frames[:-1]]
    assert counts == sorted(counts) and counts[0] == 1
    assert frames[-2]["choices"] == []


@hosted()
async def test_stop_strings_cut_both_ways_alike(bench: Bench) -> None:
    bench.script.play = bench.script.say("ABCDEFGHIJKLM")
    body = await (await bench.chat(stop="DEFGHIJ")).json()
    assert body["choices"][0]["message"]["content"] == "ABC"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert texts(await bench.frames(stop=["XX", "YY", "ZZ", "DEFGHIJ"])) == "ABC"
    # The worker would have gone on: closing the iterator is what stops it.
    assert bench.script.closed == 2 and bench.script.finished == 0
    assert texts(await bench.frames(stop="DEFGHIJX")) == "ABCDEFGHIJKLM"
    assert bench.script.finished + bench.script.closed == 3


@hosted()
async def test_length_is_said(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello world")
    body = await (await bench.chat(max_tokens=2)).json()
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 2
    assert bench.script.requests[0].sampling.max_tokens == 2


@hosted()
async def test_an_answer_without_a_token(bench: Bench) -> None:
    bench.script.play = bench.script.say("")
    frames = await bench.frames()
    assert [choice["delta"] for frame in frames[:-1] for choice in frame["choices"]] == [
        {"role": "assistant", "content": ""}, {}]
    assert (await (await bench.chat()).json())["choices"][0]["message"]["content"] == ""


@hosted()
async def test_several_choices(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello world")
    body = await (await bench.chat(n=3, messages=asking(picture()))).json()
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [
        (index, "hello world") for index in range(3)]
    one = len(bench.script.tokenizer.encode("hello world").ids) + 1
    assert body["usage"]["completion_tokens"] == 3 * one
    assert body["usage"]["prompt_tokens"] == len(bench.script.requests[0].tokens)
    assert bench.script.requests[0].n == 3
    frames = await bench.frames(n=3)
    assert [texts(frames, index) for index in range(3)] == ["hello world"] * 3
    order = [choice["index"] for frame in frames[:-1] for choice in frame["choices"]]
    assert order != sorted(order)       # interleaved as they come


@hosted()
async def test_choices_end_one_by_one(bench: Bench) -> None:
    encode = bench.script.tokenizer.encode

    async def play(request: Request) -> AsyncIterator[AnswerEvent]:
        yield 0, Prefilled(request.id)
        yield 1, Tokens(request.id, tuple(encode("A").ids))
        yield 0, Tokens(request.id, tuple(encode("B").ids))
        yield 1, Tokens(request.id, tuple(encode("ignored").ids))
        yield 1, Done(request.id, "length")
        yield 0, Tokens(request.id, tuple(encode("C").ids))
        yield 0, Done(request.id, "length")

    bench.script.play = play
    body = await (await bench.chat(n=2, stop="A")).json()
    assert [(choice["message"]["content"], choice["finish_reason"]) for choice in body["choices"]] == [
        ("BC", "length"), ("", "stop")]
    assert body["usage"]["completion_tokens"] == 3


@hosted()
async def test_logprobs(bench: Bench) -> None:
    bench.script.play = bench.script.say("hé")
    answer = await bench.chat(logprobs=True, top_logprobs=3)
    content = (await answer.json())["choices"][0]["logprobs"]["content"]
    assert "".join(bytes(entry["bytes"]).decode(errors="replace") for entry in content) == "hé" or content
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "hé"
    assert content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -9000.5, -9999.0]
    frames = await bench.frames(logprobs=True)
    entries = [entry for frame in frames[:-1] for choice in frame["choices"] if choice["logprobs"]
               for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in content]
    assert all(entry["top_logprobs"] == [] for entry in entries)


@hosted()
async def test_infinite_logprobs_are_floored_and_nan_is_a_fault(bench: Bench) -> None:
    def script(value: float) -> Any:
        async def play(request: Request) -> AsyncIterator[AnswerEvent]:
            yield 0, Tokens(request.id, (5,), (TokenLogprob(value, ((6, float("-inf")),)),))
            yield 0, Done(request.id, "length")
        return play

    bench.script.play = script(float("-inf"))
    entry = (await (await bench.chat(logprobs=True, top_logprobs=1)).json())["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
    bench.script.play = script(float("nan"))
    answer = await bench.chat(logprobs=True)
    assert answer.status == 500 and (await answer.json())["error"]["code"] == "broken_logits"
