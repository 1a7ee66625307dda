"""The `messages` of a chat request: JSON to a conversation, every fault named by its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from epdd.errors import BadRequest

ROLES = ("system", "developer", "user", "assistant", "tool")

# Fields of a message that templates read, and under which name; all others that SDKs echo back (refusal,
# audio, ...) are ignored.
_TEMPLATE_FIELDS = {"name": "name", "tool_call_id": "tool_call_id", "reasoning": "reasoning_content",
                    "reasoning_content": "reasoning_content"}

_Json = dict[str, Any]


@dataclass(frozen=True)
class ImageRef:
    """An image as the client names it; `param` is its place in the request, for error messages."""

    url: str
    param: str


@dataclass(frozen=True)
class Message:
    role: str                               # developer has become system
    content: str | list[str | ImageRef]     # null has become ""
    fields: _Json = field(default_factory=dict)     # name, tool_calls, ...: as the template reads them


@dataclass(frozen=True)
class Conversation:
    """What the template is rendered from."""

    messages: list[Message]
    tools: list[_Json] = field(default_factory=list)
    options: _Json = field(default_factory=dict)    # chat_template_kwargs

    @property
    def images(self) -> list[ImageRef]:
        """Every image of the whole conversation, in order."""
        return [part for message in self.messages if not isinstance(message.content, str)
                for part in message.content if isinstance(part, ImageRef)]


def parse_messages(value: Any) -> list[Message]:
    """Raises BadRequest naming the message and part."""
    if not isinstance(value, list):
        raise BadRequest("messages must be a list of messages", param="messages")
    if not value:
        raise BadRequest("messages must hold at least one message", param="messages")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise BadRequest(f"{where} must be an object", param=where)
    role = item.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    fields: _Json = {}
    for name, template_name in _TEMPLATE_FIELDS.items():
        value = item.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise BadRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
            fields[template_name] = value
    calls = item.get("tool_calls")
    if calls and role == "assistant":
        fields["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    content = item.get("content")
    if content is None:
        # Only an assistant may say nothing: SDKs echo null beside tool_calls, function_call or refusal.
        if role != "assistant":
            raise BadRequest(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
        content = ""
    return Message("system" if role == "developer" else role, _content(content, f"{where}.content"), fields)


def _content(value: Any, where: str) -> str | list[str | ImageRef]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a string or a list of parts", param=where)
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(value)]


def _part(part: Any, where: str) -> str | ImageRef:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRequest(f"{where} must be an object with a type", param=where)
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        text = part.get("text")
        if not isinstance(text, str):
            raise BadRequest(f"{where}.text must be a string", param=f"{where}.text")
        return text
    if kind == "refusal":   # an assistant's part that SDKs echo back
        return str(part.get("refusal") or "")
    if kind in ("image_url", "input_image"):
        # Older clients send the URL as a bare string; `detail` is accepted and changes nothing.
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if not isinstance(url, str):
            raise BadRequest(f"{where}.image_url must be a URL or an object with a url", param=f"{where}.image_url")
        return ImageRef(url, where)
    raise BadRequest(f"{where} has an unknown type; text, image_url and input_image are supported", param=where)


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
        # The API carries arguments as JSON text, templates want the object and write JSON themselves.
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": function["name"], "arguments": arguments if arguments is not None else {}}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}
