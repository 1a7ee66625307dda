"""The OpenAPI document is complete and matches the real answers."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from epdd.errors import Overloaded, WorkerLost, WorkerTimeout
from epdd.frontend.api import openapi
from epdd.frontend.api.openapi import OPERATIONS, Error, document

from tests.frontend.bench import Bench, events, hosted
from tests.frontend.images.pictures import asking, picture

GET = {operation.path: operation for operation in OPERATIONS if operation.method == "get"}
POST = {operation.path: operation for operation in OPERATIONS if operation.method == "post"}


def refs(value: Any) -> set[str]:
    """Every $ref below."""
    if isinstance(value, dict):
        found = {value["$ref"]} if "$ref" in value else set()
        return found.union(*(refs(item) for item in value.values()))
    return set().union(*(refs(item) for item in value)) if isinstance(value, list) else set()


@hosted(model={"aliases": ("gpt-4o",)})
async def test_the_document_is_whole(bench: Bench) -> None:
    answer = await bench.http.get(f"{bench.url}/openapi.json")
    found = await answer.json()
    assert found == document(("tiny-vl", "gpt-4o"), False) and found["openapi"].startswith("3.1")
    assert {(path, method) for path, item in found["paths"].items() for method in item} == {
        (operation.path, operation.method) for operation in OPERATIONS}
    names = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    assert refs(found) <= names
    chat = found["components"]["schemas"]["ChatBody"]["properties"]
    assert chat["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 8}
    assert chat["model"]["anyOf"] == [{"enum": ["tiny-vl", "gpt-4o"]}, {"type": "null"}]
    assert chat["audio"]["enum"] == [None, False, "", [], {}] and "audio" in chat["audio"]["description"]
    text = found["components"]["schemas"]["CompletionBody"]["properties"]
    assert "messages" in text["continue_final_message"]["description"] or "chat" in \
        text["continue_final_message"]["description"]
    assert {"bad_words", "structured_outputs", "regex", "user", "n_predict"} <= chat.keys() & text.keys()
    assert found["components"]["schemas"]["ChatCompletion"]["properties"]["model"] == {"type": "string"}


def test_every_route_is_in_it(family: Any) -> None:
    """Every served path is described, and the other way round."""
    @hosted()
    async def test(bench: Bench) -> None:
        for operation in OPERATIONS:
            path = bench.url + operation.path.replace("{name}", "tiny-vl")
            assert (await bench.http.request(operation.method, path)).status in (200, 400)
            assert (await bench.http.delete(path)).status == 405
        served = {(str(route.resource.canonical), method) for route in bench.routes
                  if route.resource and (method := route.method.lower()) != "head"
                  and not re.match("/(page/|$)", route.resource.canonical)}     # files for browsers
        assert served == {(operation.path, operation.method) for operation in OPERATIONS}

    test(family)


def test_keys_are_named_where_there_are_any() -> None:
    assert "security" not in str(document(("m",), False))
    paths = document(("m",), True)["paths"]
    open_to_all = {path for path, item in paths.items() for one in item.values() if "security" not in one}
    assert open_to_all == {"/health", "/ready", "/ping"}
    assert all(("401" in one["responses"]) == ("security" in one) for item in paths.values() for one in item.values())


async def checked(answer: Any, operation: openapi.Operation) -> Any:
    """The answer's JSON, which must match the schema of its status."""
    status = answer.status
    assert status == 200 or status in operation.refusals
    kind = operation.answer if status == 200 else operation.unavailable if status == 503 else Error
    body = await answer.json()
    assert kind is not None and answer.content_type == "application/json"
    msgspec.convert(body, kind)
    return body


@hosted()
async def test_answers_are_as_described(bench: Bench) -> None:
    for path in GET.keys() - {"/metrics", "/openapi.json"}:
        await checked(await bench.http.get(bench.url + path.replace("{name}", "tiny-vl")), GET[path])
    await checked(await bench.http.get(f"{bench.url}/v1/models/other"), GET["/v1/models/{name}"])
    bench.status["state"] = "failed"
    for path in ("/health", "/ready"):
        answer = await bench.http.get(bench.url + path)
        assert answer.status == 503
        await checked(answer, GET[path])


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": asking("what?", picture()), "n": 2}),
    ("/v1/chat/completions", {"messages": asking("what?"), "logprobs": True, "top_logprobs": 3}),
    ("/v1/completions", {"prompt": ["a", "b"]}), ("/v1/completions", {"prompt": "a", "logprobs": 2}),
    ("/tokenize", {"messages": asking("what?", picture())}), ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/v1/detokenize", {"tokens": [5, 6]})])
def test_answers_to_bodies_are_as_described(family: Any, path: str, body: dict[str, Any]) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        async def post(**fields: Any) -> Any:
            return await checked(await bench.http.post(bench.url + path, json={**body, **fields}), POST[path])

        assert "error" not in await post()
        assert (await post(model="other"))["error"]["code"] == "model_not_found"
        assert (await post(model=5))["error"]["param"] == "model"
        chunk = POST[path].chunk
        if chunk is None:
            return
        for options in ({}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}):
            answer = await bench.http.post(bench.url + path, json={**body, "stream": True, **options})
            for frame in events(await answer.text())[:-1]:
                msgspec.convert(frame, chunk)
        for fault in (WorkerLost("gone"), WorkerTimeout("late"), Overloaded("many")):
            bench.script.play = bench.script.say("hello", fail=fault)
            assert (await post())["error"]["code"] == fault.code

    test(family)


@hosted()
async def test_examples_work(bench: Bench) -> None:
    for operation in POST.values():
        content = document(("tiny-vl",), False)["paths"][operation.path]["post"]["requestBody"]["content"]
        answer = await bench.http.post(bench.url + operation.path, json=content["application/json"]["example"])
        assert answer.status == 200, await answer.text()


@hosted()
async def test_calls_are_as_described(bench: Bench) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 5}}\n</tool_call>'
    bench.script.play = bench.script.say(f"well {call}\n{call}")
    operation, body = POST["/v1/chat/completions"], {"messages": asking("what?"), "tools": [tool]}
    found = await checked(await bench.chat(**body), operation)
    choice, = found["choices"]
    assert len(choice["message"]["tool_calls"]) == 2 and choice["finish_reason"] == "tool_calls"
    assert operation.chunk
    for frame in (await bench.frames(**body))[:-1]:
        msgspec.convert(frame, operation.chunk)
