"""What an answer has to look like: the fields `response_format`, `tools`, `tool_choice`, `parallel_tool_calls`.

They become one grammar, which a PD worker enforces token by token.  `parse` looks at shapes and sizes; `check` compiles
what the request brought, so that no worker ever hears of a schema that is wrong.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from epdd.errors import BadRequest
from epdd.frontend import tools as tool_fields

if TYPE_CHECKING:
    from llguidance import LLTokenizer

GRAMMAR_CHARS_MAX = 128 << 10   # of all schemas of a request
CHECKED_KEPT = 32               # grammars known to be good: agents send the same tools turn after turn

_Json = dict[str, Any]


@dataclass(frozen=True)
class Structure:
    """What is asked of an answer.  The default asks nothing."""

    grammar: str = ""           # Lark; empty: any text
    calls: bool = False         # the answer may hold calls
    tools: list[_Json] = field(default_factory=list)    # for the template
    terms: tuple[tuple[str, str], ...] = ()     # (place in the request, grammar) of each schema by itself


def parse(data: _Json) -> Structure:
    """Raises BadRequest with `param`: what can be told without compiling."""
    answer = _response_format(data.get("response_format"))
    tools = tool_fields.parse(data)
    terms = [(tool.param, _start(tool_fields.schema(tool.schema, tool.strict, tool.param))) for tool in tools.callable]
    if answer:      # where a call is forced too: what was sent is looked at
        terms.append(("response_format", _start(answer)))
    grammar = tool_fields.grammar(tools, answer) if tools.callable else _start(answer) if answer else ""
    if len(grammar) > GRAMMAR_CHARS_MAX:
        raise BadRequest(f"tools and response_format have {len(grammar)} characters of schemas; at most "
                         f"{GRAMMAR_CHARS_MAX} are allowed", param="tools" if tools.callable else "response_format")
    return Structure(grammar, bool(tools.callable), tools.shown, tuple(terms))


async def check(structure: Structure, executor: Executor) -> None:
    """Compile it, off the event loop.  Raises BadRequest naming the schema at fault."""
    if structure.grammar:
        await asyncio.get_running_loop().run_in_executor(executor, _check, structure)


def _check(structure: Structure) -> None:
    for param, term in structure.terms:
        if fault := _fault(term):
            raise BadRequest(f"{param}: {fault}", param=param)
    if len(structure.terms) > 1 and (fault := _fault(structure.grammar)):
        raise BadRequest(f"tools: all together: {fault}", param="tools")


@lru_cache(CHECKED_KEPT)
def _fault(grammar: str) -> str:
    """What is wrong with a grammar; nothing if it can be followed."""
    # Here and not above: most daemons never need it, and it takes 9 MB.
    from epdd.grammar import begin, fault
    return fault(begin(grammar, _byte_tokens()))


@cache
def _byte_tokens() -> LLTokenizer:
    """Where each token is a byte: all that a grammar can be told by without the checkpoint's own."""
    import llguidance
    return llguidance.LLTokenizer("byte")


def _response_format(value: Any) -> str:
    """The term of the answer; empty for text."""
    if value is None:
        return ""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise BadRequest("response_format must be an object with the type text, json_object or json_schema",
                         param="response_format")
    for name, given in value.items():
        if given is not None and name not in ("type", "json_schema" if kind == "json_schema" else "type"):
            raise BadRequest(f"response_format of type {kind} has no field {name[:100]}", param="response_format")
    if kind == "text":
        return ""
    if kind == "json_object":
        return tool_fields.schema({"type": "object"}, True, "response_format")
    return tool_fields.schema(_json_schema(value.get("json_schema")), True, "response_format")


def _json_schema(value: Any) -> _Json:
    if not isinstance(value, dict) or not isinstance(value.get("schema"), dict):
        raise BadRequest("response_format.json_schema must be an object with a schema, an object itself",
                         param="response_format")
    for name, kind, word in (("name", str, "a string"), ("description", str, "a string"),
                             ("strict", bool, "true or false")):
        if not (value.get(name) is None or isinstance(value[name], kind)):
            raise BadRequest(f"response_format.json_schema.{name} must be {word}", param="response_format")
    for name in value.keys() - {"name", "description", "schema", "strict"}:
        raise BadRequest(f"response_format.json_schema has no field {name[:100]}", param="response_format")
    schema: _Json = value["schema"]
    return schema


def _start(term: str) -> str:
    return f"start: {term}"
