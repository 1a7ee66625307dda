"""Grammars checked as the endpoints do it, by one process for all tests of a run."""

from __future__ import annotations

import asyncio
import atexit

import uvloop

from epdd.frontend.structured import structured_output
from epdd.frontend.structured.grammar_checker import GrammarChecker
from epdd.frontend.structured.structured_output import StructuredOutput

_runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
_checker = GrammarChecker()


def check(structure: StructuredOutput) -> None:
    """Raises BadRequest."""
    _runner.run(structured_output.check(structure, _checker))


@atexit.register
def _end() -> None:
    _runner.run(_checker.close())
    _runner.close()
