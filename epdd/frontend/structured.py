"""What an answer has to look like: the forms of `constraints.py` and the fields of `tools.py`.

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
from epdd.frontend import constraints
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
