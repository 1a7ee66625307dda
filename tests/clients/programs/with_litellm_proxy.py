"""openai-python against LiteLLM's proxy, which has epdd behind it; the facts come on standard input."""

import json
import sys

import openai

facts = json.load(sys.stdin)
client = openai.OpenAI(base_url=facts["url"], api_key=facts["key"], max_retries=0)


def user(*parts):
    return {"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": part}} if part.startswith("data:") else
        {"type": "text", "text": part} for part in parts]}


ASKED = {"model": facts["model"], "temperature": 0, "messages": [user(facts["image"], facts["question"])]}
COUNTS = (facts["prompt_tokens"], facts["completion_tokens"])


def streamed(**fields):
    """Text and the counts of usage, None if no chunk had any."""
    text, reasons, counts = "", [], None
    for chunk in client.chat.completions.create(**ASKED, stream=True, **fields):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        if chunk.usage:
            counts = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
    assert reasons == ["stop"], reasons
    return text, counts


def refused(kind, status, words, **fields):
    for stream in (False, True):
        try:
            client.chat.completions.create(**ASKED | fields, stream=stream)
        except kind as error:
            assert error.status_code == status and words in str(error), error
        else:
            raise AssertionError(f"not refused as {kind.__name__}")


assert [model.id for model in client.models.list()] == [facts["model"]]
answer = client.chat.completions.create(**ASKED)
assert answer.choices[0].message.content == facts["answer"] and answer.choices[0].finish_reason == "stop"
assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == COUNTS
assert streamed() == (facts["answer"], None)
assert streamed(stream_options={"include_usage": True}) == (facts["answer"], COUNTS)
refused(openai.BadRequestError, 400, "no known format", messages=[user(facts["broken_image"], "What?")])
refused(openai.BadRequestError, 400, "maximum context length is 8192", messages=[user(facts["too_long"])])
