"""What an answer has to look like: the forms of `constraints.py` and the fields of `tool_schema.py`.

They become one grammar, which a PD worker enforces token by token.  `parse` looks at shapes and sizes; `check` has it
compiled, so that no worker ever hears of a schema that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epdd.errors import BadRequest
from epdd.frontend.structured import constraints, tool_schema as tool_fields
from epdd.frontend.structured.grammar_checker import GrammarChecker

GRAMMAR_CHARS_MAX = 128 << 10   # of all schemas of a request

_Json = dict[str, Any]


@dataclass(frozen=True)
class Structure:
    """What is asked of an answer.  The default asks nothing."""

    grammar: str = ""           # Lark; empty: any text
    calls: bool = False         # the answer may hold calls
    tools: list[_Json] = field(default_factory=list)    # for the template
    terms: tuple[tuple[str, str], ...] = ()     # (place in the request, grammar) of each schema by itself


def wanted(asked: Any) -> bool:
    """Whether a body has any field that `parse` works on: up to 50 ms, which the event loop has not."""
    return any(getattr(asked, name, None) for name in ("tools", *constraints.FIELDS))


def parse(data: _Json) -> Structure:
    """Raises BadRequest with `param`: what can be told without compiling."""
    form = constraints.parse(data)
    tools = tool_fields.parse(data)
    terms = [(tool.param, f"start: {tool_fields.schema(tool.schema, tool.strict, tool.param)}")
             for tool in tools.callable]
    if form:        # where a call is forced too: what was sent is looked at
        terms.append((form.param, form.grammar))
        if tools.callable and form.whole:
            raise BadRequest(f"{form.param} cannot stand beside tools: it says nothing of calls; "
                             "use response_format, a regex or a choice, or tool_choice none", param=form.param)
    grammar = tool_fields.grammar(tools, form.lark if form else "") if tools.callable else form.grammar if form else ""
    if len(grammar) > GRAMMAR_CHARS_MAX:
        param = form.param if form else "tools"
        params = "tools" if not form else f"tools and {param}" if tools.callable else param
        raise BadRequest(f"{params} have {len(grammar)} characters as a grammar; at most {GRAMMAR_CHARS_MAX} are "
                         "allowed", param="tools" if tools.callable else param)
    return Structure(grammar, bool(tools.callable), tools.shown, tuple(terms))


async def check(structure: Structure, checker: GrammarChecker) -> None:
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
