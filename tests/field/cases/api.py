"""D33 to D40: what the API's fields mean."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from typing import Any

from epdd.frontend.text.detokenizer import Vocabulary
from tests.field.cases import pictures
from tests.field.cases.prompts import tokenizer
from tests.field.bench import SETTLE_S, Bench
from tests.field.table import case

GREETING = "Hello! I can name colours and shapes, count them, and list images in order."


@case("D33", "empty or odd messages", "no messages; null, [] and \"\" as content; image only; unknown part; bare URL",
      "400 naming the place; [], \"\", image only and a bare URL are 200", policy="image_url may be a bare string")
async def messages(bench: Bench) -> None:
    user = {"role": "user"}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for messages, param in (([], "messages"), (None, "messages"), ([user | {"content": None}], "messages[0].content"),
                            ([user | {"content": [{"type": "text", "text": "x"}, {"type": "video", "video": 1}]}],
                             "messages[0].content[1]"), ([user], "messages[0].content"), ([3], "messages[0]")):
        reply = await bench.post({"messages": messages} if messages is not None else {})
        assert reply.status == 400 and reply.error["param"] == param, reply.text
    bare = {"type": "image_url", "image_url": pictures.url(pictures.circle("red", 64))}
    for messages in ([user | {"content": []}], [user | {"content": ""}], [user | {"content": [bare]}],
                     [user | {"content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                      {"role": "tool", "tool_call_id": "c", "content": "a red circle"}]):
        reply = await bench.post({"messages": messages, "max_tokens": 4})
        assert reply.status == 200, reply.text


@case("D34", "usage in streams", "no stream_options; {}; include_usage false, true; without stream",
      "one chunk without choices, last, for true only; the last: 400", policy="stream_options needs stream")
async def usage(bench: Bench) -> None:
    for options in (None, {}, {"include_usage": False}, {"include_usage": True}):
        fields = {} if options is None else {"stream_options": options}
        reply = await bench.ask("Hello", stream=True, **fields)
        empty = [event for event in reply.events if not event["choices"]]
        if options == {"include_usage": True}:
            assert reply.events[-1:] == empty and empty[0]["usage"]["prompt_tokens"] > 0
        else:
            assert empty == [] and not any(event.get("usage") for event in reply.events)
        assert reply.text.rstrip().endswith("data: [DONE]")
    reply = await bench.ask("Hello", stream_options={"include_usage": True})
    assert reply.status == 400 and reply.error["param"] == "stream_options"


@case("D35", "stop string over several tokens", "a known answer; one stop, four, the first token, one that never comes",
      "the same text both ways, without the stop; held text comes at the end")
async def stops(bench: Bench) -> None:
    for stop, text, reason in (("colours and shap", "Hello! I can name ", "stop"),
                               (["xyz", "zz", "count them", "name colours and sh"], "Hello! I can ", "stop"),
                               ("H", "", "stop"), ("order.!", GREETING, "stop"), ("in order. And", GREETING, "stop")):
        for stream in (False, True):
            reply = await bench.ask("Hello", max_tokens=80, stop=stop, stream=stream)
            assert (reply.said, reply.finish) == (text, reason)
    reply = await bench.ask("Hello", max_tokens=80, stop="colours and shap", stream=True)
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in reply.events]
    assert all("colour" not in piece for piece in pieces)


def byte_tokens(text: str) -> list[int]:
    """Ids of the tokens of one byte each that make up `text`."""
    vocabulary = Vocabulary(tokenizer())
    ids = {vocabulary.bytes(token): token for token in range(tokenizer().get_vocab_size())}
    return [ids[bytes([byte])] for byte in text.encode()]


@case("D36", "characters split over tokens",
      "U+1FAE0, U+1F979 and U+9F9C byte by byte, among broken ones; cut in the middle",
      "streamed or not, the same text; U+FFFD only for invalid bytes; a cut leaves one or none",
      policy="an unfinished character at the end becomes one U+FFFD")
async def characters(bench: Bench) -> None:
    for char in ("\U0001fae0", "\U0001f979", "\u9f9c"):
        fields = {"max_tokens": 100, "temperature": 2, "seed": 1, "ignore_eos": True, "logprobs": True, "n": 8,
                  "logit_bias": {str(token): 100 for token in byte_tokens(char)}}
        whole, stream = await asyncio.gather(bench.ask("Hi", **fields), bench.ask("Hi", stream=True, **fields))
        texts = [choice["message"]["content"] for choice in whole.body["choices"]]
        for text, choice in zip(texts, whole.body["choices"]):
            data = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
            assert set(data) <= set(char.encode()) and text == data.decode(errors="replace")
        assert stream.texts == texts and any(char in text for text in texts)
        cut = await bench.ask("Hi", max_tokens=1, stream=True, logit_bias={str(byte_tokens(char)[0]): 100})
        assert cut.said == "\ufffd" and cut.finish == "length"


@case("D37", "token limits", "max_tokens 0, -1, \"5\", null, 10^9; max_completion_tokens, alone and besides",
      "0, -1, \"5\": 400 with the field; null: absent; 10^9: what fits", policy="-1 is refused; the newer name wins")
async def limits(bench: Bench) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (0, -1, "5", 1.5):
            reply = await bench.ask("Hello", **{"max_tokens": None, name: value})
            assert reply.status == 400 and reply.error["param"] == name
            assert not isinstance(value, int) or f"is {value};" in reply.error["message"]
    for fields in ({"max_tokens": None}, {"max_tokens": 10**9}, {"max_tokens": 2, "max_completion_tokens": 100}):
        assert await bench.answers("Hello", **fields) == GREETING
    for fields in ({"max_completion_tokens": 2, "max_tokens": None}, {"max_tokens": 100, "max_completion_tokens": 2}):
        reply = await bench.ask("Hello", **fields)
        assert reply.finish == "length" and reply.body["usage"]["completion_tokens"] == 2


BAD_SCHEMAS: list[Any] = [
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": "string"}}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "(a"}}},
    {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": 3}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/$defs/none"}}},
    {"type": "no_such_type"}, "json", {"type": None, "json_schema": {}},
]


@case("D38", "bad response_format",
      "a property that is a string; a broken pattern; no schema; $ref to itself and to nothing",
      "400 response_format at once, no worker is involved", policy="never ignored")
async def formats(bench: Bench) -> None:
    for form in BAD_SCHEMAS:
        reply = await bench.refused(None, "Hello", response_format=form)
        assert (reply.error["param"] or "").startswith("response_format"), (form, reply.text)
        assert reply.seconds < SETTLE_S


@case("D39", "logprobs with minus infinity", "top_logprobs 20 with top_k 1, and with all but one token banned",
      "200, JSON, finite", policy="the floor is -9999.0")
async def infinite(bench: Bench) -> None:
    for fields in ({"top_k": 1}, {"logit_bias": {str(token): -100 for token in range(1, 700)}}, {"top_p": 0.001}):
        reply = await bench.ask("Hello", logprobs=True, top_logprobs=20, max_tokens=4, temperature=1, **fields)
        for entry in reply.body["choices"][0]["logprobs"]["content"]:
            values = [entry["logprob"], *(other["logprob"] for other in entry["top_logprobs"])]
            assert len(values) == 21 and all(math.isfinite(value) and -9999 <= value <= 0 for value in values)
        assert "Infinity" not in reply.text and "NaN" not in reply.text


@case("D40", "n = 3 with an image", "with seed and logit_bias, streaming or not; n = 9",
      "one encoding; choices 0 to 2; the prompt counted once; the same again; 400")
async def choices(bench: Bench) -> None:
    image, fields = pictures.circle("green", 107), {"n": 3, "seed": 5, "temperature": 2, "max_tokens": 40,
                                                    "ignore_eos": True}
    before = bench.status()["cache"]["misses"]
    one = await bench.ask(image, "Describe the image.", **fields | {"n": 1})
    whole, again = [await bench.ask(image, "Describe the image.", logit_bias={"5": -100}, **fields) for _ in range(2)]
    texts = [choice["message"]["content"] for choice in whole.body["choices"]]
    assert [choice["index"] for choice in whole.body["choices"]] == [0, 1, 2] and len(set(texts)) > 1
    assert texts == [choice["message"]["content"] for choice in again.body["choices"]]
    assert whole.body["usage"]["prompt_tokens"] == one.body["usage"]["prompt_tokens"]
    assert bench.status()["cache"]["misses"] == before + 1
    stream = await bench.ask(image, "Describe the image.", stream=True, logit_bias={"5": -100}, **fields)
    assert stream.texts == texts
    order = [choice["index"] for event in stream.events for choice in event["choices"]]
    assert order != sorted(order)       # each as it comes, not in sequence
    await bench.refused(None, "Hello", n=9)


@case("D40p", "n = 3 is one prefill", "two prompts of 3,000 tokens, one with n = 3",
      "processor time of the PD worker as for one prompt")
async def one_prefill(bench: Bench) -> None:
    spent = []
    for seed, n in ((39, 1), (40, 1), (41, 3)):     # the first is for a worker's one-time work
        prompt = " ".join(str(random.Random(seed * 1000 + i).random()) for i in range(150))
        pid = next(worker for worker in bench.status()["workers"] if worker["name"] == "pd/0")["pid"]
        before = processor_ticks(pid)
        reply = await bench.ask(prompt, n=n, max_tokens=1)
        assert len(reply.body["choices"]) == n and reply.body["usage"]["prompt_tokens"] > 2000
        spent.append(processor_ticks(pid) - before)
    assert spent[2] < 2 * spent[1], spent           # three prompts would be three times as much


def processor_ticks(pid: int) -> int:
    """CPU ticks of all its threads, since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


@case("D45", "other servers' fields", "prompt_logprobs, n_predict, options, two formats; bad_words, a choice, seed -1",
      "400 naming the field and the alternative; honoured", policy="a constraint is never dropped")
async def others(bench: Bench) -> None:
    for fields, param, way in (
            ({"prompt_logprobs": 1}, "prompt_logprobs", "use logprobs"), ({"n_predict": 4}, "n_predict", "max_tokens"),
            ({"options": {"num_predict": 4}}, "options", "into the request"),
            ({"guided_regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "two formats")):
        reply = await bench.refused(None, "Hello", **fields)
        assert reply.error["param"] == param and way in reply.error["message"]
    assert await bench.answers("Hello", n_predict=None, echo=False, prompt_logprobs=None, seed=-1) == GREETING
    assert await bench.answers("Hello", guided_choice=["blue", "green"]) in ("blue", "green")
    assert not (await bench.answers("Hello", bad_words=["Hello"])).startswith("Hello!")
