"""LiteLLM as a library, by both of its names for such a server; the facts come on standard input."""

import asyncio
import json
import sys

import litellm

facts = json.load(sys.stdin)


def user(*parts):
    return {"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": part}} if part.startswith("data:") else
        {"type": "text", "text": part} for part in parts]}


ASKED = [user(facts["image"], facts["question"])]
HISTORY = [
    user(facts["image"], "Look."),
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "the circle"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "It is there."},
    {"role": "user", "content": facts["question"]}]


def ask(provider, messages=ASKED, complete=litellm.completion, model=facts["model"], **fields):
    return complete(model=f"{provider}/{model}", api_base=facts["url"], api_key="none", messages=messages,
                    temperature=0, num_retries=0, **fields)


def check(answer):
    assert answer.choices[0].message.content == facts["answer"], answer
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (facts["prompt_tokens"], facts["completion_tokens"])


def check_stream(chunks, usage):
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == facts["answer"]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices].count("stop") == 1
    if usage:
        found = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
        assert found[-1].prompt_tokens == facts["prompt_tokens"], found
        assert found[-1].completion_tokens == facts["completion_tokens"], found


async def asynchronous(provider):
    check(await ask(provider, complete=litellm.acompletion))
    stream = await ask(provider, complete=litellm.acompletion, stream=True)
    check_stream([chunk async for chunk in stream], usage=False)


def refused(provider, kind, status, *words, **fields):
    try:
        ask(provider, **fields)
    except kind as error:
        assert error.status_code == status and all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"not refused as {kind.__name__}")


for provider in ("openai", "hosted_vllm"):
    check(ask(provider))
    check_stream(list(ask(provider, stream=True)), usage=False)
    check_stream(list(ask(provider, stream=True, stream_options={"include_usage": True})), usage=True)
    asyncio.run(asynchronous(provider))
    answer = ask(provider, HISTORY)
    assert answer.choices[0].message.content == facts["answer"]
    assert answer.usage.prompt_tokens == facts["history_tokens"]
    refused(provider, litellm.NotFoundError, 404, "does not exist", model="another")
    refused(provider, litellm.BadRequestError, 400, "no known format", messages=[user(facts["broken_image"], "What?")])
    # LiteLLM knows this fault by its wording alone, and its routers act on it.
    refused(provider, litellm.ContextWindowExceededError, 400, "8192", messages=[user(facts["too_long"])])
