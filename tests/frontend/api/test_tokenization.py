"""/tokenize and /detokenize: the same tokens as the completions get, and back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontend.house import House, hosted
from tests.frontend.images.pictures import asking, picture


async def post(house: House, path: str, **fields: Any) -> tuple[int, Any]:
    answer = await house.http.post(house.url + path, json=fields)
    return answer.status, await answer.json()


@hosted()
async def test_messages_count_as_a_chat_completion_counts_them(house: House) -> None:
    messages = asking("what is ", picture(size=(140, 140)), " and ", picture("blue"), "?")
    status, found = await post(house, "/tokenize", messages=messages)
    await house.chat(messages=messages)
    request, = house.script.requests
    assert status == 200 and found == {"count": len(request.tokens), "max_model_len": 4096, "tokens": request.tokens,
                                       "token_strs": None}
    assert found["tokens"].count(house.context.family.image_token_id) == 25 + 4
    limited = (await post(house, "/tokenize", messages=messages, mm_processor_kwargs={"max_pixels": 3136}))[1]
    assert limited["count"] == found["count"] - 21


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_there_and_back(family: Any, prefix: str) -> None:
    @hosted()
    async def test(house: House) -> None:
        text = "<|im_start|>naïve 🫠\n" * 1500        # over what is decoded on the event loop
        status, found = await post(house, prefix + "/tokenize", prompt=text, model="tiny-vl", return_token_strs=True)
        assert status == 200 and found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 4096
        assert found["token_strs"][0] == "<|im_start|>"
        status, back = await post(house, prefix + "/detokenize", tokens=found["tokens"])
        assert (status, back) == (200, {"prompt": text})
        assert house.script.requests == [] and house.context.stats.counts["accepted"] == 0

    test(family)


@hosted()
async def test_nothing_is_no_tokens(house: House) -> None:
    assert (await post(house, "/tokenize", prompt=""))[1]["count"] == 0
    assert (await post(house, "/detokenize", tokens=[])) == (200, {"prompt": ""})


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
    async def test(house: House) -> None:
        got, body = await post(house, path, **fields)
        assert (got, body["error"]["param"]) == (status, param), body

    test(family)
