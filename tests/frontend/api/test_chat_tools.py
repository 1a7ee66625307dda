"""Calls and formats over HTTP, by openai-python and by plain HTTP, on a scripted pipeline."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.frontend.bench import Bench, hosted
from tests.frontend.images.pictures import asking

LOOK = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "ä b"}}\n</tool_call>'
TWO = f"Wait: \n{CALL}\n{CALL.replace('ä b', 'c')}"


def client(bench: Bench) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="none", max_retries=0)


@hosted()
async def test_a_whole_answer_with_calls(bench: Bench) -> None:
    bench.script.play = bench.script.say(TWO)
    body = await (await bench.chat(messages=asking("hi"), tools=[LOOK])).json()
    choice, = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["role"] == "assistant" and message["content"] == "Wait:" and message["refusal"] is None
    ids = [call.pop("id") for call in message["tool_calls"]]
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "look", "arguments": arguments}}
                                     for arguments in ('{"at": "ä b"}', '{"at": "c"}')]
    assert len(set(ids)) == 2 and all(name.startswith("call_") for name in ids)
    assert "<tool_call>" in bench.script.requests[0].sampling.grammar


@hosted()
async def test_a_call_alone_has_no_content(bench: Bench) -> None:
    bench.script.play = bench.script.say(CALL)
    body = await (await bench.chat(messages=asking("hi"), tools=[LOOK], tool_choice="required", n=2)).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == [None, None]
    assert [len(choice["message"]["tool_calls"]) for choice in body["choices"]] == [1, 1]


@hosted()
async def test_a_stream_of_calls(bench: Bench) -> None:
    bench.script.play = bench.script.say(TWO)
    frames = await bench.frames(messages=asking("hi"), tools=[LOOK], logprobs=True)
    choices = [frame["choices"][0] for frame in frames[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Wait:"
    pieces = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    begun = [piece for piece in pieces if "id" in piece]
    assert [(piece["index"], piece["type"], piece["function"]["name"]) for piece in begun] == [
        (0, "function", "look"), (1, "function", "look")]
    assert all(piece.keys() == {"index", "function"} for piece in pieces if piece not in begun)
    assert ["".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == index)
            for index in (0, 1)] == ['{"at": "ä b"}', '{"at": "c"}']
    # Every token has its logprob, those of calls too.
    told = sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"])
    assert told == len(bench.script.tokenizer.encode(TWO, add_special_tokens=False).ids)


@hosted()
async def test_the_official_client_puts_calls_together(bench: Bench) -> None:
    bench.script.play = bench.script.say(TWO)
    async with client(bench) as api:
        ask: dict[str, Any] = {"model": "tiny-vl", "messages": asking("hi"), "tools": [LOOK]}
        whole = await api.chat.completions.create(**ask)
        calls = whole.choices[0].message.tool_calls
        assert calls and [json.loads(call.function.arguments) for call in calls] == [  # type: ignore[union-attr]
            {"at": "ä b"}, {"at": "c"}]
        async with api.chat.completions.stream(**ask) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls" and final.choices[0].message.content == "Wait:"
        calls = final.choices[0].message.tool_calls
        assert calls and [json.loads(call.function.arguments) for call in calls] == [  # type: ignore[union-attr]
            {"at": "ä b"}, {"at": "c"}]
        # The history goes back in as the client holds it.
        bench.script.play = bench.script.say("a cat")
        history = [*asking("hi"), whole.choices[0].message,
                   *({"role": "tool", "tool_call_id": call.id, "content": "seen"} for call in calls)]
        last = await api.chat.completions.create(model="tiny-vl", messages=history, tools=[LOOK])  # type: ignore
        assert last.choices[0].message.content == "a cat" and last.choices[0].message.tool_calls is None
        text = bench.script.tokenizer.decode(bench.script.requests[-1].tokens, skip_special_tokens=False)
        assert text.count('"arguments": {"at": ') == 2 and text.count("seen") == 2


@hosted()
async def test_length_cuts_a_call(bench: Bench) -> None:
    tokens = len(bench.script.tokenizer.encode(CALL, add_special_tokens=False).ids)
    bench.script.play = bench.script.say(CALL)
    body = await (await bench.chat(messages=asking("hi"), tools=[LOOK], max_tokens=tokens - 3)).json()
    choice, = body["choices"]
    assert choice["finish_reason"] == "length"
    assert '{"at": "ä b"}}\n'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@hosted()
async def test_calls_stay_text_where_none_were_asked_for(bench: Bench) -> None:
    bench.script.play = bench.script.say(CALL)
    for fields in ({}, {"tools": [LOOK], "tool_choice": "none"}):
        body = await (await bench.chat(messages=asking("hi"), **fields)).json()
        assert body["choices"][0]["message"] == {"role": "assistant", "content": CALL, "refusal": None}
        assert body["choices"][0]["finish_reason"] == "stop"
        assert bench.script.requests[-1].sampling.grammar == ""
        text = bench.script.tokenizer.decode(bench.script.requests[-1].tokens, skip_special_tokens=False)
        assert "# Tools" not in text


@hosted()
async def test_a_bad_schema_is_refused_before_any_worker(bench: Bench) -> None:
    async with client(bench) as api:
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(
                model="tiny-vl", messages=asking("hi"), stream=True,  # type: ignore[call-overload]
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {
                    "type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}}})
        assert bad.value.param == "response_format" and "unclosed group" in bad.value.message
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(
                model="tiny-vl", messages=asking("hi"),  # type: ignore[call-overload]
                tools=[{"type": "function", "function": {"name": "x", "parameters": {"properties": {"a": "b"}}}}])
        assert bad.value.param == "tools[0].function.parameters"
    assert not bench.script.requests and bench.door.in_flight == 0


@hosted()
async def test_a_format_is_handed_to_the_worker(bench: Bench) -> None:
    bench.script.play = bench.script.say("{}")
    async with client(bench) as api:
        answer = await api.chat.completions.create(model="tiny-vl", messages=asking("hi"),  # type: ignore
                                                   response_format={"type": "json_object"}, n=2)
    assert [choice.message.content for choice in answer.choices] == ["{}", "{}"]
    assert bench.script.requests[0].sampling.grammar.startswith("start: %json {")
