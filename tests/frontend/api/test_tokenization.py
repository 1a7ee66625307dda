"""/tokenize and /detokenize: the same tokens as the completions get, and back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontend.bench import Bench, hosted
from tests.frontend.images.pictures import asking, picture


async def post(bench: Bench, path: str, **fields: Any) -> tuple[int, Any]:
    answer = await bench.http.post(bench.url + path, json=fields)
    return answer.status, await answer.json()


@hosted()
async def test_messages_count_as_a_chat_completion_counts_them(bench: Bench) -> None:
    messages = asking("what is ", picture(size=(140, 140)), " and ", picture("blue"), "?")
    status, found = await post(bench, "/tokenize", messages=messages)
    await bench.chat(messages=messages)
    request, = bench.script.requests
    assert status == 200 and found == {"count": len(request.tokens), "max_model_len": 4096, "tokens": request.tokens,
                                       "token_strs": None}
    assert found["tokens"].count(bench.context.family.image_token_id) == 25 + 4
    limited = (await post(bench, "/tokenize", messages=messages, mm_processor_kwargs={"max_pixels": 3136}))[1]
    assert limited["count"] == found["count"] - 21


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_there_and_back(family: Any, prefix: str) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        text = "<|im_start|>naïve 🫠\n" * 1500        # over what is decoded on the event loop
        status, found = await post(bench, prefix + "/tokenize", prompt=text, model="tiny-vl", return_token_strs=True)
        assert status == 200 and found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 4096
        assert found["token_strs"][0] == "<|im_start|>"
        status, back = await post(bench, prefix + "/detokenize", tokens=found["tokens"])
        assert (status, back) == (200, {"prompt": text})
        assert bench.script.requests == [] and bench.context.stats.counts["accepted"] == 0

    test(family)


@hosted()
async def test_nothing_is_no_tokens(bench: Bench) -> None:
    assert (await post(bench, "/tokenize", prompt=""))[1]["count"] == 0
    assert (await post(bench, "/detokenize", tokens=[])) == (200, {"prompt": ""})


@pytest.mark.parametrize(("path", "fields", "status", "param"), [
    ("/tokenize", {}, 400, "prompt"), ("/tokenize", {"prompt": "a", "messages": asking("b")}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"), ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"prompt": "a", "model": "gpt"}, 404, "model"),
    ("/tokenize", {"messages": asking("a"), "continue_final_message": True}, 400, "continue_final_message"),
    ("/tokenize", {"messages": asking({"type": "image_url", "image_url": "data:image/png;base64,!"})}, 400,
     "messages[0].content[0]"),
    ("/tokenize", {"prompt": "word " * 100_000}, 400, "prompt"),
    ("/detokenize", {}, 400, "tokens"), ("/detokenize", {"tokens": [1 << 30]}, 400, "tokens"),
    ("/detokenize", {"tokens": [5, -1]}, 400, "tokens[1]"), ("/detokenize", {"tokens": "5"}, 400, "tokens"),
])
def test_refusals_name_the_field(family: Any, path: str, fields: dict[str, Any], status: int, param: str) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        got, body = await post(bench, path, **fields)
        assert (got, body["error"]["param"]) == (status, param), body

    test(family)
