"""One grammar for an answer: its format (`response_format.py`) and the tools it may call (`tool_schema.py`).

A PD worker enforces it token by token.  `parse` checks shapes and sizes; `check` has the grammar compiled, so that no
worker gets a wrong schema.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epdd.errors import BadRequest
from epdd.frontend.structured import response_format, tool_schema as tool_fields
from epdd.frontend.structured.grammar_checker import GrammarChecker

GRAMMAR_CHARS_MAX = 128 << 10   # of all schemas of a request

_Json = dict[str, Any]


@dataclass(frozen=True)
class StructuredOutput:
    """The grammar of an answer.  The default allows any text."""

    grammar: str = ""           # Lark; empty: any text
    calls: bool = False         # the answer may hold calls
    tools: list[_Json] = field(default_factory=list)    # for the template
    terms: tuple[tuple[str, str], ...] = ()     # (place in the request, grammar) of each single schema


def wanted(asked: Any) -> bool:
    """Whether a body has a field for `parse`, which may take 50 ms: too long for the event loop."""
    return any(getattr(asked, name, None) for name in ("tools", *response_format.FIELDS))


def parse(data: _Json) -> StructuredOutput:
    """Raises BadRequest with `param` for faults that show without compiling."""
    answer = response_format.parse(data)
    tools = tool_fields.parse(data)
    terms = [(tool.param, f"start: {tool_fields.schema(tool.schema, tool.strict, tool.param)}")
             for tool in tools.callable]
    if answer:      # checked also if a call is forced
        terms.append((answer.param, answer.grammar))
        if tools.callable and answer.whole:
            raise BadRequest(f"{answer.param} cannot be combined with tools: a whole grammar leaves no tool calls; "
                             "use response_format, a regex or a choice, or tool_choice none", param=answer.param)
    grammar = answer.grammar if answer else ""
    if tools.callable:
        grammar = tool_fields.grammar(tools, answer.lark if answer else "")
    if len(grammar) > GRAMMAR_CHARS_MAX:
        param = answer.param if answer else "tools"
        params = "tools" if not answer else f"tools and {param}" if tools.callable else param
        raise BadRequest(f"{params} have {len(grammar)} characters as a grammar; at most {GRAMMAR_CHARS_MAX} are "
                         "allowed", param="tools" if tools.callable else param)
    return StructuredOutput(grammar, bool(tools.callable), tools.shown, tuple(terms))


async def check(structure: StructuredOutput, checker: GrammarChecker) -> None:
    """Raises BadRequest naming the schema at fault, CapacityError if it cannot be checked now."""
    if not structure.grammar:
        return
    grammars = [term for _, term in structure.terms]
    if len(grammars) > 1:
        grammars.append(structure.grammar)
    place, fault = await checker.fault(grammars)
    if place == len(structure.terms):
        raise BadRequest(f"tools: all together: {fault}", param="tools")
    if place >= 0:
        param = structure.terms[place][0]
        raise BadRequest(f"{param}: {fault}", param=param)
