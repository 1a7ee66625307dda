"""Tools in the prompt of a checkpoint whose chat template does not show them (Qwen2-VL, Qwen2.5-VL, the demo).

They are written as in Qwen's later templates: tools in the system message, calls in the assistant's text, results in
a user message.
"""

from __future__ import annotations

import json
from dataclasses import replace

from epdd.frontend.requests.messages import Conversation, ImageRef, Message
from epdd.frontend.structured.tool_call_parser import BETWEEN, CLOSE, HEAD, OPEN

_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_Content = str | list[str | ImageRef]


def with_tools_in_text(conversation: Conversation) -> Conversation:
    """The same conversation, with tools, calls and results in its texts."""
    messages: list[Message] = []
    result_before = False
    for message in conversation.messages:
        if message.role == "assistant" and message.fields.get("tool_calls"):
            message = _with_calls(message)
        is_result = message.role == "tool"
        if is_result:
            message = Message("user", _around("<tool_response>\n", message.content, "\n</tool_response>"))
        if is_result and result_before:     # consecutive results are one message
            message = Message("user", _joined(_joined(messages.pop().content, "\n"), message.content))
        messages.append(message)
        result_before = is_result
    if conversation.tools:
        tools = _SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in conversation.tools))
        if messages[0].role == "system":
            messages[0] = replace(messages[0], content=_joined(messages[0].content, f"\n\n{tools}"))
        else:
            messages.insert(0, Message("system", tools))
    return replace(conversation, messages=messages, tools=[])


def _with_calls(message: Message) -> Message:
    fields = dict(message.fields)
    calls = BETWEEN.join(
        OPEN + HEAD[0] + call["function"]["name"] + HEAD[1]
        + json.dumps(call["function"]["arguments"], ensure_ascii=False) + CLOSE for call in fields.pop("tool_calls"))
    return Message(message.role, _joined(message.content, BETWEEN + calls if message.content else calls), fields)


def _around(before: str, content: _Content, after: str) -> _Content:
    return _joined(_joined(before, content), after)


def _joined(first: _Content, second: _Content) -> _Content:
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    return [part for content in (first, second) for part in ([content] if isinstance(content, str) else content)]
