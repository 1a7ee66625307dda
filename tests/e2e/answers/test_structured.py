"""Formats and calls through the whole daemon, by openai-python and by plain HTTP."""

import concurrent.futures
import json
import random
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest
from PIL import Image

from tests.e2e.daemon import data_url, image_part, running, text_part
from tests.models import schemas

LOOK = {"type": "function", "function": {"name": "look", "description": "Look closer.", "parameters": {
    "type": "object", "properties": {"at": {"enum": ["left", "right"]}, "note": {"type": "string", "maxLength": 8}},
    "required": ["at", "note"], "additionalProperties": False}}}
BAD = [{"type": "object", "properties": {"a": "string"}}, {"type": "string", "pattern": "("}, None, {"$ref": "#"}]


class Shape(pydantic.BaseModel):
    kind: Literal["circle", "square"]
    sizes: list[int] = pydantic.Field(max_length=2)
    label: str = pydantic.Field(max_length=6)


@pytest.fixture(scope="module")
def daemon():
    with running(encoder__workers=1) as daemon:
        yield daemon.ready()


def client(daemon):
    return openai.OpenAI(base_url=daemon.url("/v1"), api_key="none", max_retries=0)


def test_schemas_hold_beside_each_other_and_disturb_nobody(daemon):
    """Every answer is complete or has the finish reason length; a plain answer is the same as alone."""
    alone = daemon.say([text_part("hi")], max_tokens=40)
    made = [kind(random.Random(seed)) for kind in schemas.KINDS for seed in range(100, 104)]

    def ask(schema):
        body = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        return daemon.chat("answer", max_tokens=1000, temperature=1, **body)["choices"][0]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers, plain = pool.map(ask, made), pool.submit(daemon.say, [text_part("hi")], max_tokens=40)
        cut = 0
        for schema, choice in zip(made, answers):
            if choice["finish_reason"] == "length":     # at this temperature a number may go on for ever
                cut += 1
                continue
            assert choice["finish_reason"] == "stop"
            assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(choice["message"]["content"]))
        assert cut <= 3 and plain.result() == alone


def test_the_official_client_parses_and_streams(daemon):
    with client(daemon) as api:
        messages = [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": data_url(Image.new("RGB", (96, 64), "red"))}},
            {"type": "text", "text": "What is it?"}]}]
        ask = {"model": "epdd-demo", "messages": messages, "temperature": 1, "max_tokens": 400, "seed": 5}
        parsed = api.chat.completions.parse(response_format=Shape, n=3, **ask)
        assert [choice.index for choice in parsed.choices] == [0, 1, 2]
        assert all(isinstance(choice.message.parsed, Shape) for choice in parsed.choices)
        again = api.chat.completions.parse(response_format=Shape, n=3, **ask)
        assert [choice.message.content for choice in again.choices] == [
            choice.message.content for choice in parsed.choices]
        with api.chat.completions.stream(response_format=Shape, **ask) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == parsed.choices[0].message.parsed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_forced_calls_by_the_official_client(daemon, choice):
    with client(daemon) as api:
        ask = {"model": "epdd-demo", "tools": [LOOK], "tool_choice": choice, "parallel_tool_calls": False,
               "messages": [{"role": "user", "content": "Where?"}], "temperature": 1, "max_tokens": 400, "seed": 1}
        whole = api.chat.completions.create(**ask).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        call, = whole.message.tool_calls
        assert call.function.name == "look"
        arguments = json.loads(call.function.arguments)
        assert jsonschema.Draft202012Validator(LOOK["function"]["parameters"]).is_valid(arguments)
        with api.chat.completions.stream(**ask) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert json.loads(streamed.message.tool_calls[0].function.arguments) == arguments
        history = [*ask["messages"], whole.message, {"role": "tool", "tool_call_id": call.id, "content": "a cat"}]
        assert api.chat.completions.create(**{**ask, "messages": history, "tool_choice": "none"}).choices[0].message


def test_tools_may_be_left_alone(daemon):
    """The demo model has no training in calls: it answers in text, as without the tools' grammar."""
    choice = daemon.chat([text_part("hi")], tools=[LOOK], logprobs=True, top_logprobs=20)["choices"][0]
    assert choice["message"]["content"] and "tool_calls" not in choice["message"]
    assert all(entry["logprob"] >= -9999 for entry in choice["logprobs"]["content"])


def test_bad_schemas_reach_no_worker(daemon):
    before = daemon.at_rest()
    done = [worker["done"] for worker in daemon.status()["workers"]]
    image = image_part(Image.new("RGB", (64, 64)))
    for schema in BAD:
        status, body = daemon.post({"messages": [{"role": "user", "content": [image]}], "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})
        assert status == 400 and body["error"]["param"] == "response_format", body
    assert [worker["done"] for worker in daemon.status()["workers"]] == done
    assert daemon.at_rest()["pids"] == before["pids"]
