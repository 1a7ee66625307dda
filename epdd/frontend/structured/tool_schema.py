"""The fields `tools`, `tool_choice` and `parallel_tool_calls`, and the grammar of calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import orjson

from epdd.errors import BadRequest
from epdd.frontend.structured.tool_call_parser import BETWEEN, CLOSE, HEAD, OPEN

TOOLS_MAX = 128             # OpenAI's own
CALLS_MAX = 32              # of one answer: a model that loops would call until its context is full
SCHEMA_BYTES_MAX = 64 << 10
PROPERTIES_MAX = 500        # of a schema: compiling takes 0.05 s at this number and grows with its square
REGEX_CHARS_MAX = 4096      # of all patterns of a schema: 5,000 times "a?" take 0.5 s, and 30,000 half a minute
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")      # OpenAI's own

# White space as models write it; llguidance's own rule lets a model write blanks for ever.
_WHITE = r"( |\n[ \t]{0,32})"

_Json = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """A function that may be called."""

    name: str
    schema: _Json       # of its arguments
    strict: bool
    param: str          # its place in the request


@dataclass(frozen=True)
class Tools:
    """The three fields, checked."""

    shown: list[_Json]              # for the template; empty with tool_choice none
    callable: tuple[Tool, ...]      # empty: the answer is text
    forced: bool                    # the answer is a call, without text
    calls_max: int


def parse(data: _Json) -> Tools:
    """Raises BadRequest naming the tool."""
    parallel = data.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise BadRequest("parallel_tool_calls must be true or false", param="parallel_tool_calls")
    shown = data.get("tools")
    if shown is None:
        shown = []
    if not isinstance(shown, list):
        raise BadRequest("tools must be a list", param="tools")
    if len(shown) > TOOLS_MAX:
        raise BadRequest(f"tools holds {len(shown)} tools; at most {TOOLS_MAX} are allowed", param="tools")
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(shown))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            param = f"tools[{index}].function.name"
            raise BadRequest(f"{param} is the name of another tool as well", param=param)
    choice = data.get("tool_choice")
    wanted = _named(choice)
    if choice == "none":
        return Tools([], (), False, 0)
    if not tools and choice not in (None, "auto"):
        raise BadRequest("tool_choice asks for a call, and there are no tools", param="tool_choice")
    if wanted and wanted not in names:
        raise BadRequest("tool_choice names a function that is not among the tools", param="tool_choice")
    if wanted:      # that function, once
        return Tools(shown, tuple(tool for tool in tools if tool.name == wanted), True, 1)
    return Tools(shown, tools, choice == "required", 1 if parallel is False else CALLS_MAX)


def _tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise BadRequest(f"{where} must be an object with the type function", param=where)
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} must have a function with a name", param=where)
    if not _NAME.fullmatch(function["name"]):
        raise BadRequest(f"{where}.function.name must be 1 to 64 letters, digits, _ or -",
                         param=f"{where}.function.name")
    description, strict, schema = (function.get(name) for name in ("description", "strict", "parameters"))
    if not (description is None or isinstance(description, str)):
        raise BadRequest(f"{where}.function.description must be a string", param=f"{where}.function.description")
    if not (strict is None or isinstance(strict, bool)):
        raise BadRequest(f"{where}.function.strict must be true or false", param=f"{where}.function.strict")
    param = f"{where}.function.parameters"
    if schema is None:      # as OpenAI says: a function without parameters
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise BadRequest(f"{param} must be the JSON schema of an object", param=param)
    return Tool(function["name"], {**schema, "type": "object"}, bool(strict), param)


def _named(choice: Any) -> str:
    """The function that a choice names; empty if it names none.  Raises BadRequest if it is not a choice."""
    if choice in (None, "none", "auto", "required"):
        return ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise BadRequest("tool_choice must be none, auto, required or "
                         "{\"type\": \"function\", \"function\": {\"name\": ...}}", param="tool_choice")
    return name


def grammar(tools: Tools, answer: str) -> str:
    """The Lark of an answer that may hold calls; `answer` is the term of an answer without, empty for any text."""
    first, next_one = json.dumps(OPEN), json.dumps(BETWEEN + OPEN)
    names = [f"tool{at}" for at in range(len(tools.callable))]
    rules = [f"call: {json.dumps(HEAD[0])} ({' | '.join(names)}) {json.dumps(CLOSE)}"]
    rules += [f"{name}: {json.dumps(tool.name + HEAD[1])} {schema(tool.schema, tool.strict, tool.param)}"
              for name, tool in zip(names, tools.callable)]
    more = f" ({next_one} call){{0,{tools.calls_max - 1}}}" if tools.calls_max > 1 else ""
    calls = f"call{more}"
    if tools.forced:
        rules.append(f"start: {first} {calls}")
    elif answer:
        rules.append(f"start: {answer} | {first} {calls}")
    else:   # lazy: text ends where a call begins, so that a call is not matched as text
        rules += [f"start: TEXT | said {calls}", f"said[lazy]: TEXT {first}", r"TEXT: /(.|\n)*/"]
    return "\n".join(rules)


def schema(value: _Json, strict: bool, param: str) -> str:
    """A JSON schema as a term of a grammar.  Raises BadRequest if it exceeds a limit of size.

    Only a tool's schema may be not strict: keywords that a grammar cannot enforce (uniqueItems, not) are then left to
    the model, which has the schema in its prompt.
    """
    if "x-guidance" in value:
        raise BadRequest(f"{param}: x-guidance is not a keyword of JSON schemas", param=param)
    try:
        data = orjson.dumps({**value, "x-guidance": {
            "whitespace_pattern": _WHITE, "lenient": not strict, "coerce_one_of": not strict}})
    except orjson.JSONEncodeError:
        raise BadRequest(f"{param} is nested too deeply", param=param) from None
    if len(data) > SCHEMA_BYTES_MAX:
        raise BadRequest(f"{param} has {len(data)} bytes of JSON; at most {SCHEMA_BYTES_MAX} are allowed", param=param)
    count, chars = _sizes(value)
    if count > PROPERTIES_MAX:
        raise BadRequest(f"{param} has {count} properties; at most {PROPERTIES_MAX} are allowed", param=param)
    if chars > REGEX_CHARS_MAX:
        raise BadRequest(f"{param} has {chars} characters of patterns; at most {REGEX_CHARS_MAX} are allowed",
                         param=param)
    return f"%json {data.decode()}"


def _sizes(value: _Json) -> tuple[int, int]:
    """Properties of all objects in a schema, and characters of all its patterns."""
    count, chars, left = 0, 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            properties, pattern = item.get("properties"), item.get("pattern")
            count += len(properties) if isinstance(properties, dict) else 0
            chars += len(pattern) if isinstance(pattern, str) else 0
            patterns = item.get("patternProperties")
            chars += sum(map(len, patterns)) if isinstance(patterns, dict) else 0
            left += item.values()
        elif isinstance(item, list):
            left += item
    return count, chars
