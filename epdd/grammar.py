"""Grammars that answers must follow, in llguidance's Lark: compiled under the same limits where a request is checked
and where it is answered.

The daemon imports this when the first such request comes: the library takes 9 MB.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from epdd.errors import BadRequest

LEXER_STATES_MAX = 50_000   # of one answer, at 1 to 2 kB; the library's own limit would let one take half a gigabyte
ERROR_CHARS_MAX = 160

_LIMITS = LLParserLimits(max_lexer_states=LEXER_STATES_MAX, verbose_errors=False)


def compiled(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """At the beginning of an answer.  Raises BadRequest if the grammar is wrong, too large, or fits no text."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raises BadRequest if nothing can follow, or if finding out took more than the limits allow."""
    if matcher.is_error():
        raise BadRequest(_reason(matcher.get_error()), code="bad_grammar")
    if matcher.is_stopped() and not matcher.is_accepting():
        raise BadRequest("nothing can fit it", code="bad_grammar")


def _reason(error: str) -> str:
    """What is wrong, without the place in a text that the client never wrote and the state dumped after it."""
    error = error.partition("failed to compile JSON schema: ")[2] or error
    error = error.partition("<state>")[0].partition("\n   1 |")[0].partition("\n(in ")[0]
    return " ".join(error.split())[:ERROR_CHARS_MAX]
