"""Grammars for structured output, in llguidance's Lark, compiled with the same limits when a request is checked and
when it is answered.

The daemon does not import this module: a separate process checks grammars (`frontend/structured/grammar_checker.py`).
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LEXER_STATES_MAX = 50_000   # of one answer, 1 to 2 kB each; the library's own limit allows half a gigabyte
SYMBOLS_MAX = 20_000        # 128 tools of ten parameters are 12,000, which a worker compiles in at most 0.2 s
FAULT_CHARS_MAX = 160
# CPU time for all grammars of a request.  A worker needs as long for them, and its other answers wait meanwhile.  128
# tools of ten parameters take 0.2 s.
COMPILE_S = 1.0
MEMORY_MAX = 1 << 30        # bytes of address space of the checking process
NOTHING_FITS = "nothing can fit it"

_LIMITS = LLParserLimits(max_lexer_states=LEXER_STATES_MAX, max_grammar_size=SYMBOLS_MAX, verbose_errors=False)


def begin(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of an answer, with the mask of first tokens; `fault` says whether it is usable."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def fault(matcher: LLMatcher) -> str:
    """Why an answer cannot continue or end here: the grammar is wrong, nothing fits it, or it is over the limits; empty
    if it can."""
    if not matcher.is_error():
        return NOTHING_FITS if matcher.is_stopped() and not matcher.is_accepting() else ""
    error = str(matcher.get_error())
    if error.startswith("panic:"):      # llguidance reports a full table so
        return "it is too large"
    if error.startswith("NoExtension"):
        return NOTHING_FITS
    # Cut off positions in a text that the client did not write, and the dump of internal state.
    error = error.partition("failed to compile JSON schema: ")[2] or error
    error = error.partition("; following special tokens")[0]
    if "regex parse error:" in error:
        error = "regular expression: " + error.rpartition("error: ")[2]
    error = error.partition("\n<")[0].partition(" <")[0].partition("\n   1 |")[0]
    return " ".join(error.split())[:FAULT_CHARS_MAX]


def serve() -> None:
    """Check grammars: a line of stdin is a JSON list of them, a line of stdout `[index, fault]` of the first bad one.

    The process ends with stdin, or by a signal if a compilation takes too much time or memory.
    """
    for kind, limit in ((resource.RLIMIT_AS, MEMORY_MAX), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))
    # `systemctl kill` sends these to all processes of the service, but they are for the daemon.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    tokenizer = LLTokenizer("byte")     # enough to check a grammar without the checkpoint's tokenizer
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
