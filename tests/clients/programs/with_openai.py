"""openai-python, synchronous and not: the facts come on standard input."""

import asyncio
import json
import sys
from typing import Literal

import openai
import pydantic

facts = json.load(sys.stdin)
BASE = {"base_url": facts["url"], "api_key": "none", "max_retries": 0}
client = openai.OpenAI(**BASE)


def user(*parts):
    return {"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": part}} if part.startswith("data:") else
        {"type": "text", "text": part} for part in parts]}


ASKED = {"model": facts["model"], "temperature": 0, "messages": [user(facts["image"], facts["question"])]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"enum": ["the circle", "the square"]}}, "required": ["at"],
    "additionalProperties": False}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "the circle"}'}}


def models():
    assert [model.id for model in client.models.list()] == [facts["model"]]
    assert client.models.retrieve(facts["model"]).id == facts["model"]


def check_whole(answer):
    assert answer.choices[0].message.content == facts["answer"], answer
    assert answer.choices[0].finish_reason == "stop" and answer.object == "chat.completion"
    check_usage(answer.usage)


def check_usage(usage):
    assert (usage.prompt_tokens, usage.completion_tokens) == (facts["prompt_tokens"], facts["completion_tokens"])
    assert usage.total_tokens == facts["prompt_tokens"] + facts["completion_tokens"]


def check_stream(chunks, usage):
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert text == facts["answer"] and reasons[-1] == "stop" and not any(reasons[:-1]), chunks
    # Unasked, there is no chunk without choices; asked, it is the last one.
    assert [bool(chunk.choices) for chunk in chunks] == [True] * len(reasons) + [False] * usage
    if usage:
        check_usage(chunks[-1].usage)


def synchronous():
    check_whole(client.chat.completions.create(**ASKED))
    check_stream(list(client.chat.completions.create(**ASKED, stream=True)), usage=False)
    check_stream(list(client.chat.completions.create(
        **ASKED, stream=True, stream_options={"include_usage": True})), usage=True)
    with client.chat.completions.stream(**ASKED, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        check_whole(stream.get_final_completion())


async def asynchronous():
    async with openai.AsyncOpenAI(**BASE) as client:
        async def streamed():
            return [chunk async for chunk in await client.chat.completions.create(**ASKED, stream=True)]

        *whole, chunks = await asyncio.gather(*(client.chat.completions.create(**ASKED) for _ in range(4)), streamed())
        for answer in whole:
            check_whole(answer)
        check_stream(chunks, usage=False)


def several_images():
    answer = client.chat.completions.create(
        model=facts["model"], temperature=0, messages=[user(*facts["images"], "List the images in order.")])
    assert answer.choices[0].message.content == facts["listing"]


def cut_at_the_length():
    answer = client.chat.completions.create(model=facts["model"], temperature=0, max_completion_tokens=5,
                                            messages=[{"role": "user", "content": "Hello"}])
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 5
    assert answer.choices[0].message.content == "Hello! I can name"


def a_tool_history():
    messages = [
        user(facts["image"], "Look."), {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It is there."},
        {"role": "user", "content": facts["question"]}]
    for tools in ({}, {"tools": [TOOL]}):
        answer = client.chat.completions.create(**ASKED | {"messages": messages}, **tools)
        assert answer.choices[0].message.content == facts["answer"]
        assert answer.usage.prompt_tokens - facts["history_tokens"] > 100 if tools else \
            answer.usage.prompt_tokens == facts["history_tokens"], answer


def a_demanded_call():
    fields = ASKED | {"tools": [TOOL], "tool_choice": "required"}
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion()
    for answer in (client.chat.completions.create(**fields), streamed):
        assert answer.choices[0].finish_reason == "tool_calls", answer
        called = answer.choices[0].message.tool_calls[0]
        assert called.id and called.function.name == "look"
        assert json.loads(called.function.arguments)["at"] in ("the circle", "the square")


def a_demanded_form():
    class Answer(pydantic.BaseModel):
        colour: Literal["red", "blue"]

    answer = client.chat.completions.parse(**ASKED, response_format=Answer)
    assert isinstance(answer.choices[0].message.parsed, Answer)


def leaving_a_stream():
    with client.chat.completions.create(model=facts["model"], messages=[{"role": "user", "content": "Hello"}],
                                        stream=True, max_tokens=2000, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))


def refused(kind, status, code, **fields):
    for stream in (False, True):
        try:
            client.chat.completions.create(**ASKED | fields, stream=stream)
        except kind as error:
            assert (error.status_code, error.code) == (status, code), error
            assert error.request_id and error.body["message"], error
            shown = error
        else:
            raise AssertionError(f"{fields} was accepted")
    return shown


def errors():
    refused(openai.NotFoundError, 404, "model_not_found", model="another")
    bad = refused(openai.BadRequestError, 400, "invalid_image_format", messages=[user(facts["broken_image"], "What?")])
    assert bad.param == "messages[0].content[0]"
    long = refused(openai.BadRequestError, 400, "context_length_exceeded", messages=[user(facts["too_long"])])
    assert "maximum context length is 8192 tokens" in str(long)
    assert refused(openai.BadRequestError, 400, "invalid_request", temperature=9).param == "temperature"


models()
synchronous()
asyncio.run(asynchronous())
several_images()
cut_at_the_length()
a_tool_history()
a_demanded_call()
a_demanded_form()
leaving_a_stream()
errors()
print(openai.__version__)
