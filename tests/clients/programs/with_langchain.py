"""LangChain's ChatOpenAI: pictures, streams, a history with a tool's call; the facts come on standard input."""

import asyncio
import json
import sys
from typing import Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

facts = json.load(sys.stdin)


def model(**fields):
    return ChatOpenAI(**{"base_url": facts["url"], "api_key": "none", "model": facts["model"], "temperature": 0,
                         "max_retries": 0, **fields})


def human(*parts):
    return HumanMessage(content=[
        {"type": "image_url", "image_url": {"url": part}} if part.startswith("data:") else
        {"type": "text", "text": part} for part in parts])


ASKED = [human(facts["image"], facts["question"])]


def check(answer, usage=True):
    assert answer.content == facts["answer"], answer
    assert answer.response_metadata["finish_reason"] == "stop"
    if usage:
        counted = answer.usage_metadata
        assert counted["input_tokens"] == facts["prompt_tokens"]
        assert counted["output_tokens"] == facts["completion_tokens"]


def joined(pieces):
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    return total


def pictures():
    check(model().invoke(ASKED))
    # LangChain's own kind of part, which it turns into the API's.
    kind, data = facts["image"].removeprefix("data:").split(";base64,")
    check(model().invoke([HumanMessage(content=[
        {"type": "image", "base64": data, "mime_type": kind}, {"type": "text", "text": facts["question"]}])]))
    answer = model().invoke([human(*facts["images"], "List the images in order.")])
    assert answer.content == facts["listing"]


def streams():
    check(joined(list(model().stream(ASKED))), usage=False)
    check(joined(list(model(stream_usage=True).stream(ASKED))))

    async def streamed():
        return [piece async for piece in model().astream(ASKED)]

    check(joined(asyncio.run(streamed())), usage=False)


@tool
def look(at: Literal["the circle", "the square"]) -> str:
    """Look at something."""
    return f"{at} is there."


def tools():
    call = {"id": "call_1", "name": "look", "args": {"at": "the circle"}}
    messages = [human(facts["image"], "Look."), AIMessage(content="", tool_calls=[call]),
                ToolMessage(content="It is there.", tool_call_id="call_1"), HumanMessage(content=facts["question"])]
    answer = model().invoke(messages)
    check(answer, usage=False)
    assert answer.usage_metadata["input_tokens"] == facts["history_tokens"]
    check(model().bind_tools([look]).invoke(messages), usage=False)
    # Strict, since a schema that leaves other properties open lets the demo model invent them for long.
    bound = model().bind_tools([look], tool_choice="any", strict=True)
    for answer in (bound.invoke(ASKED), joined(list(bound.stream(ASKED)))):
        [called] = answer.tool_calls
        assert called["name"] == "look" and called["args"]["at"] in ("the circle", "the square")


def a_demanded_form():
    class Answer(BaseModel):
        colour: Literal["red", "blue"]

    assert isinstance(model().with_structured_output(Answer).invoke(ASKED), Answer)


def refused(kind, code, model, messages):
    for ask in (model.invoke, lambda asked: list(model.stream(asked))):
        try:
            ask(messages)
        except kind as error:
            assert error.code == code, error
        else:
            raise AssertionError(f"not refused with {code}")


pictures()
streams()
tools()
a_demanded_form()
refused(openai.NotFoundError, "model_not_found", model(model="another"), ASKED)
refused(openai.BadRequestError, "invalid_image_format", model(), [human(facts["broken_image"], "What?")])
refused(openai.BadRequestError, "context_length_exceeded", model(), [human(facts["too_long"])])
