"""Text completions over HTTP: prompts of every kind, whole answers and streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import orjson
import pytest

from epdd.dispatch.request import Request
from epdd.errors import BadRequest, WorkerLost
from epdd.families import ModelInfo
from epdd.frontend.context import AnswerEvent
from epdd.frontend.requests.completion_requests import PromptInput, parse_text
from epdd.wire import Done, Tokens

from tests.frontend.bench import Bench, events, hosted, settle


def texts(family: ModelInfo, **fields: Any) -> list[PromptInput]:
    return parse_text(orjson.dumps(fields), family, ("tiny-vl",))[1]


@pytest.mark.parametrize(("prompt", "found"), [
    ("a", ["a"]), (["a", "b"], ["a", "b"]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]]),
    (["a", [5]], ["a", [5]]), (["x"] * 32, ["x"] * 32)])
def test_prompts_of_every_kind(family: ModelInfo, prompt: Any, found: Any) -> None:
    assert texts(family, prompt=prompt) == found


@pytest.mark.parametrize(("fields", "param"), [
    ({}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"), ({"prompt": ["a", ""]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"), ({"prompt": [[5, True]]}, "prompt[0][1]"), ({"prompt": [1 << 40]}, "prompt"),
    ({"prompt": ["x"] * 33}, "prompt"), ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "x", "echo": True}, "echo"), ({"prompt": "x", "suffix": "end"}, "suffix"),
    ({"prompt": "x", "best_of": 2}, "best_of"), ({"prompt": "x", "logprobs": 6}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"), ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "stream_options": {}}, "stream_options")])
def test_refusals_name_the_field(family: ModelInfo, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        texts(family, **fields)
    assert caught.value.param == param and param.partition("[")[0] in caught.value.message


def test_the_place_of_an_image_is_no_token_to_name(family: ModelInfo) -> None:
    with pytest.raises(BadRequest, match="image"):
        texts(family, prompt=[family.image_token_id])


def test_the_apis_own_default_length(family: ModelInfo) -> None:
    def most(**fields: Any) -> int:
        return parse_text(orjson.dumps({"prompt": "x", **fields}), family, ("tiny-vl",))[0].sampling.max_tokens

    assert (most(), most(max_tokens=None), most(max_tokens=3)) == (16, 16, 3)


async def post(bench: Bench, **fields: Any) -> Any:
    return await bench.http.post(f"{bench.url}/v1/completions", json={"prompt": "hello", **fields})


@hosted()
async def test_a_whole_answer(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello world", cached=1)
    answer = await post(bench, prompt="<|im_start|>user\nhello", logprobs=2, best_of=1)
    assert answer.status == 200, await answer.text()
    body = await answer.json()
    request, = bench.script.requests
    tokenizer = bench.script.tokenizer
    # A control token of the text is one, as in the checkpoint's own prompts.
    assert request.tokens == tokenizer.encode("<|im_start|>user\nhello", add_special_tokens=False).ids
    assert request.tokens[0] == tokenizer.token_to_id("<|im_start|>")
    tokens = tokenizer.encode("hello world", add_special_tokens=False)
    choice, = body["choices"]
    marks = choice.pop("logprobs")
    assert choice == {"index": 0, "text": "hello world", "finish_reason": "stop"}
    assert "".join(marks["tokens"]) == "hello world" and marks["token_logprobs"] == [-0.5] * len(tokens.ids)
    assert [len(top) for top in marks["top_logprobs"]] == [2] * len(tokens.ids)
    assert [marks["text_offset"][at] for at in (0, 1)] == [0, len(marks["tokens"][0])]
    assert body["object"] == "text_completion" and body["model"] == "tiny-vl"
    assert body["id"] == request.id and request.id.startswith("cmpl-")
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(request.tokens) and usage["completion_tokens"] == len(tokens.ids) + 1
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1, "image_tokens": 0}
    assert request.sampling.max_tokens == 16 and bench.door.in_flight == 0


@hosted()
async def test_an_images_placeholder_stays_text(bench: Bench) -> None:
    await post(bench, prompt="what is <|image_pad|>?")
    request, = bench.script.requests
    assert bench.context.family.image_token_id not in request.tokens and len(request.tokens) > 8
    assert bench.script.tokenizer.decode(request.tokens, skip_special_tokens=False) == "what is <|image_pad|>?"


@hosted()
async def test_token_ids_are_taken_as_they_are(bench: Bench) -> None:
    await post(bench, prompt=[7, 8, 9])
    assert bench.script.requests[0].tokens == [7, 8, 9]


def echo(bench: Bench) -> None:
    """Every choice answers its prompt's last token twice, then its own number."""

    async def play(request: Request) -> AsyncIterator[AnswerEvent]:
        for choice in range(request.n):
            await asyncio.sleep(0)
            yield choice, Tokens(request.id, (request.tokens[-1], request.tokens[-1]))
        for choice in range(request.n):
            yield choice, Done(request.id, "length")

    bench.script.play = play


@hosted()
async def test_several_prompts_with_several_answers(bench: Bench) -> None:
    echo(bench)
    ids = [bench.script.tokenizer.token_to_id(letter) for letter in "abc"]
    body = await (await post(bench, prompt=[[ids[0]], [ids[1]], [ids[2]]], n=2)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "aa"), (1, "aa"), (2, "bb"), (3, "bb"), (4, "cc"), (5, "cc")]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15,
                             "prompt_tokens_details": {"cached_tokens": 0, "image_tokens": 0}}
    assert len({request.id for request in bench.script.requests}) == 3


@hosted()
async def test_a_stream_of_several_prompts(bench: Bench) -> None:
    echo(bench)
    ids = [[bench.script.tokenizer.token_to_id(letter)] for letter in "abc"]
    answer = await post(bench, prompt=ids, stream=True, stream_options={"include_usage": True})
    *frames, usage, done = events(await answer.text())
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6
    found: dict[int, str] = {}
    for frame in frames:
        assert frame["object"] == "text_completion" and frame["usage"] is None and frame["id"] == usage["id"]
        choice, = frame["choices"]
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    assert found == {0: "aa", 1: "bb", 2: "cc"}
    assert sum(frame["choices"][0]["finish_reason"] == "length" for frame in frames) == 3


@hosted()
async def test_one_prompt_that_fails_ends_all(bench: Bench) -> None:
    hang, fail = bench.script.say("hello", hang=True), bench.script.say("hello", fail=WorkerLost("gone"))
    bench.script.play = lambda request: (fail if request.tokens == [8] else hang)(request)
    answer = await post(bench, prompt=[[7], [8], [9]])
    assert answer.status == 503 and (await answer.json())["error"]["code"] == "worker_lost"
    await settle(lambda: bench.script.closed == 2 and bench.door.in_flight == 0)
    answer = await post(bench, prompt=[[7], [8], [9]], stream=True)
    frames = events(await answer.text())
    assert frames[-2]["error"]["code"] == "worker_lost"
    await settle(lambda: bench.script.closed == 4 and bench.door.in_flight == 0)


@hosted()
async def test_a_client_that_leaves_cancels_every_prompt(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello", hang=True)
    answer = await post(bench, prompt=["a", "b"], stream=True)
    await answer.content.readline()
    answer.close()
    await settle(lambda: bench.script.closed == 2 and bench.door.in_flight == 0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await post(bench, prompt=["a", "b"])
    await settle(lambda: bench.script.closed == 4 and bench.door.in_flight == 0)


@hosted(model={"max_model_len": 0})
async def test_a_prompt_over_the_context(bench: Bench) -> None:
    answer = await post(bench, prompt=[5] * 5000)
    error = (await answer.json())["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert error["message"].startswith("This model's maximum context length is 4096 tokens. However, your prompt")
    answer = await post(bench, prompt="word " * 100_000)
    assert (await answer.json())["error"]["code"] == "context_length_exceeded"


@hosted()
async def test_the_official_client(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello world")
    async with openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(model="tiny-vl", prompt="say", logprobs=1)
        assert answer.choices[0].text == "hello world" and answer.usage and answer.usage.prompt_tokens > 0
        assert answer.choices[0].logprobs and answer.choices[0].logprobs.text_offset
        stream = await client.completions.create(model="tiny-vl", prompt="say", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello world"
