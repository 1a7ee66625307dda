"""Turns the `messages` of a request into a conversation; errors name the message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from epdd.errors import BadRequest
from epdd.frontend.http import json_cost
from epdd.frontend.requests.schema import ChatBody, ChatMessage, ImagePart, InputImage, Part, RefusalPart, TokenizeBody

# Fields of a message that templates read -> the templates' name; others that SDKs echo back (refusal, audio, ...)
# are ignored.
_TEMPLATE_FIELDS = {"name": "name", "tool_call_id": "tool_call_id", "reasoning": "reasoning_content",
                    "reasoning_content": "reasoning_content"}

_Json = dict[str, Any]


@dataclass(frozen=True)
class ImageRef:
    """An image's URL as the client sent it; `param` is its place in the request, for error messages."""

    url: str
    param: str


@dataclass(frozen=True)
class Message:
    role: str                               # system for developer
    content: str | list[str | ImageRef]     # "" for null
    fields: _Json = field(default_factory=dict)     # name, tool_calls, ...: as templates name them


@dataclass(frozen=True)
class Conversation:
    """The input of the chat template."""

    messages: list[Message]
    tools: list[_Json] = field(default_factory=list)
    options: _Json = field(default_factory=dict)    # chat_template_kwargs
    generation_prompt: bool = True      # end the prompt with the beginning of an answer
    continued: bool = False             # end it inside the last message

    @property
    def images(self) -> list[ImageRef]:
        """Every image of the whole conversation, in order."""
        return [part for message in self.messages if not isinstance(message.content, str)
                for part in message.content if isinstance(part, ImageRef)]


def conversation(said: ChatBody | TokenizeBody, tools: list[_Json]) -> Conversation:
    """`tools` are for the template.  Raises BadRequest naming the message."""
    options = msgspec.structs.asdict(said.chat_template_kwargs) if said.chat_template_kwargs else {}
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(said.messages or [])]
    continued = bool(said.continue_final_message)
    if continued:
        _check_continued(messages[-1], said.add_generation_prompt)
    return Conversation(messages, tools, {name: value for name, value in options.items() if value is not None},
                        said.add_generation_prompt is not False and not continued, continued)


def _check_continued(last: Message, generation_prompt: bool | None) -> None:
    param, fault = "continue_final_message", ""
    if generation_prompt:
        fault = "and add_generation_prompt cannot both be true"
    elif last.role != "assistant" or "tool_calls" in last.fields:
        fault = "needs the last message to be the assistant's, without tool_calls"
    elif not (isinstance(last.content, str) or any(isinstance(part, str) for part in last.content)):
        fault = "needs text in the last message"
    if fault:
        raise BadRequest(f"{param} {fault}", param=param)


def _message(message: ChatMessage, where: str) -> Message:
    fields: _Json = {}
    for name, template_name in _TEMPLATE_FIELDS.items():
        value = getattr(message, name)
        if value is not None:
            fields[template_name] = value
    if message.tool_calls and message.role == "assistant":
        fields["tool_calls"] = _tool_calls(message.tool_calls, f"{where}.tool_calls")
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if content is None:
        # Only an assistant's content may be null: SDKs echo it beside tool_calls, function_call or refusal.
        if role != "assistant":
            raise BadRequest(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
        content = ""
    if isinstance(content, str):
        return Message(role, content, fields)
    return Message(role, [_part(part, f"{where}.content[{at}]") for at, part in enumerate(content)], fields)


def _part(part: Part, where: str) -> str | ImageRef:
    if isinstance(part, str):
        return part
    if isinstance(part, (ImagePart, InputImage)):
        # Older clients send the URL as a bare string.
        image = part.image_url
        return ImageRef(image if isinstance(image, str) else image.url, where)
    return (part.refusal or "") if isinstance(part, RefusalPart) else part.text


def _tool_calls(value: Any, where: str) -> list[_Json]:
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a list", param=where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(value)]


def _tool_call(call: Any, where: str) -> _Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} must have a function with a name", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # The API carries arguments as JSON text; templates take the object and write the JSON.  Its cost is checked
        # here because escapes in the body may have hidden it from `request_validation.py`.
        json_cost.check(arguments.encode(), f"{where}.function.arguments")
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": function["name"], "arguments": arguments if arguments is not None else {}}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}
