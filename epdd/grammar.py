"""Grammars that answers must follow, in llguidance's Lark: compiled under the same limits where a request is checked
and where it is answered.

The daemon does not import this: a process of its own checks what requests bring
(`frontend/structured/grammar_checker.py`).
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LEXER_STATES_MAX = 50_000   # of one answer, at 1 to 2 kB; the library's own limit would let one take half a gigabyte
SYMBOLS_MAX = 20_000        # 128 tools of ten parameters are 12,000; a worker compiles so many in 0.2 s at most
FAULT_CHARS_MAX = 160
# CPU time of all grammars of a request; a worker then needs no longer, and its other answers wait meanwhile.  128 tools
# of ten parameters take 0.2 s.
COMPILE_S = 1.0
MEMORY_MAX = 1 << 30        # bytes of address space of the process that checks them
NOTHING_FITS = "nothing can fit it"

_LIMITS = LLParserLimits(max_lexer_states=LEXER_STATES_MAX, max_grammar_size=SYMBOLS_MAX, verbose_errors=False)


def begin(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of an answer, its first tokens computed; `fault` says whether there are any."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def fault(matcher: LLMatcher) -> str:
    """Why an answer cannot go on or end here: a wrong grammar, one that nothing fits, or one that takes more than the
    limits allow.  Empty if it can."""
    if not matcher.is_error():
        return NOTHING_FITS if matcher.is_stopped() and not matcher.is_accepting() else ""
    error = str(matcher.get_error())
    if error.startswith("panic:"):      # the library's way to say that a table of its own is full
        return "it is too large"
    if error.startswith("NoExtension"):
        return NOTHING_FITS
    # Without the place in a text that the client never wrote, and the state dumped after it.
    error = error.partition("failed to compile JSON schema: ")[2] or error
    error = error.partition("; following special tokens")[0]
    if "regex parse error:" in error:
        error = "regular expression: " + error.rpartition("error: ")[2]
    error = error.partition("\n<")[0].partition(" <")[0].partition("\n   1 |")[0]
    return " ".join(error.split())[:FAULT_CHARS_MAX]


def serve() -> None:
    """Tell faults: a JSON list of grammars a line on stdin, `[place, fault]` of the first bad one a line on stdout.

    Ends with stdin, and in the middle of a compilation that takes too long or too much memory.
    """
    for kind, limit in ((resource.RLIMIT_AS, MEMORY_MAX), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))
    # For the daemon, where they are sent to all processes of the service (`systemctl kill`).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    tokenizer = LLTokenizer("byte")     # all that a grammar can be told by without the checkpoint's own
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)     # SIGPROF ends the process
        answer = _first_fault(json.loads(line), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _first_fault(grammars: Sequence[str], tokenizer: LLTokenizer) -> tuple[int, str]:
    for place, grammar in enumerate(grammars):
        if found := fault(begin(grammar, tokenizer)):
            return place, found
    return -1, ""
