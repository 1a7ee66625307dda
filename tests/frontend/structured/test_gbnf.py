"""Grammars in llama.cpp's and xgrammar's notation keep their language."""

from __future__ import annotations

import re
import time
from functools import cache

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epdd import grammar
from epdd.frontend.structured import gbnf

JSON = r'''
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws   # with escapes
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
'''
SUMS = 'root ::= expr "\\n"\nexpr ::= term ([-+*/] term)*\nterm ::= num | "(" expr ")"\nnum ::= [0-9]+ "0"\n'


@cache
def tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def fits(text: str, answer: str) -> bool:
    """Whether the grammar accepts the whole answer."""
    matcher = grammar.begin(gbnf.lark(text), tokenizer())
    assert not grammar.fault(matcher), grammar.fault(matcher)
    data = list(answer.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(("text", "right", "wrong"), [
    (JSON, ['{}', '{"a": [1, -2.5e-3, "x\\n\\u00e9/", {"b":null}], "c": true}'], ['{', '{"a" 1}', '[1]', '{"a": 01}']),
    (SUMS, ["10\n", "(10+(20*30))/110\n", "100\n"], ["1\n", "10", "(10\n", "10+\n"]),
    ('root ::= [a-z]+ "z"', ["az", "zzz"], ["z", "ab"]),        # the last letter is not part of the run
    ('root ::= "a"*"b"?', ["", "aab", "b"], ["ba"]),
    ('root ::= x | "b"\n  | # more\n "c"\nx ::= "a"', ["a", "b", "c"], ["", "ab"]),
    ('root ::= .{2}', ["a\n", "é龜"], ["a", "abc"]),
    ('root ::= "caf\\u00e9" "\\x41\\U0001FAE0\\t"', ["caféA🫠\t"], ["cafe"]),
    ('root ::= [^a\\-c] [\\]\\^-] [a-]', ["b]a", "x^-", "x--"], ["a]a", "-]a", "bba"]),
    ('root ::= "{}" "{0}" [{}]{2,3}', ["{}{0}{}", "{}{0}{{{"], ["{}{0}{"]),
    ('root ::= foo-Bar\nfoo-Bar ::= "q" foo-Bar | "w"', ["w", "qqw"], ["q"]),
    ('root ::= ("a" | "b" | )', ["", "a", "b"], ["ab"]),
    ('root ::= "a"{0,}', ["", "aa"], ["b"]),
    ('root ::= "a"{ 0002 , 3 }', ["aa", "aaa"], ["a", "aaaa"]),
    ('root ::= "a"{,2}', ["", "aa"], ["aaa"]),
    ('root ::= ("x" root "y")?', ["", "xxyy"], ["xy y", "xxy"]),
], ids=range(15))
def test_languages(text: str, right: list[str], wrong: list[str]) -> None:
    assert [fits(text, answer) for answer in right] == [True] * len(right)
    assert [fits(text, answer) for answer in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(("text", "fault"), [
    ("", "no rule named root"), ('x ::= "a"', "no rule named root"), ('root = "a"', "line 1"),
    ('root ::= "a\n"', "line 1"), ("root ::= [a", "line 1"), ('root ::= ("a"', "not closed"),
    ('root ::= "a" )', "begins with its name"), ("root ::= b", "uses b"), ('root ::= "a"\n\nroot ::= "b"', "line 3"),
    ('root ::= "a"{3,2}', "no range"), ('root ::= "a"{,}', "no number"), ("root ::= [z-a]", "no range"),
    ("root ::= []", "empty"), ('root ::= "\\q"', "no escape"), ('root ::= "\\ud800"', "no character"),
    ('root ::= "\\U00110000"', "no character"), ("root ::= *", "line 1"), ("root ::= <[3]>", "line 1"),
    (f'root ::= {"(" * 40}"a"{")" * 40}', "nested"), ('root ::= "a"{1000000}', "no range"),
    ("\n".join(f'r{at} ::= "a"' for at in range(600)), "over 500 rules"),
    ('root ::= "a"' + "*" * 16_000, "over 4 repetitions"), ('root ::= "a"' + "{1}" * 5_000, "over 4 repetitions"),
    ('root ::= "a"{' + "9" * 16_000 + "}", "no range up to"), ('root ::= "a"{' + "1" * 6_000 + ",2}", "no range"),
])
def test_faults_are_named(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as caught:
        gbnf.lark(text)
    assert len(str(caught.value)) < 150


# (the notation, the same as a regular expression)
PIECES = st.recursive(
    st.sampled_from([('"a"', "a"), ('"ba"', "ba"), ("[ab]", "[ab]"), ("[^a]", "[^a]"), (".", "(?s:.)"), ('""', "")]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: ("(" + " ".join(p[0] for p in parts) + ")", "(?:" + "".join(p[1] for p in parts) + ")")),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: ("(" + " | ".join(p[0] for p in parts) + ")", "(?:" + "|".join(p[1] for p in parts) + ")")),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,1}"])).map(
            lambda pair: (f"({pair[0][0]}){pair[1]}", f"(?:{pair[0][1]}){pair[1]}"))),
    max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(PIECES, st.lists(st.text("abc", max_size=6), min_size=4, max_size=8))
def test_what_has_no_recursion_is_its_regular_expression(piece: tuple[str, str], answers: list[str]) -> None:
    text, expression = piece
    for notation in (f"root ::= {text}", f"root ::= one\none ::= two\ntwo ::= {text}"):
        matcher = grammar.begin(gbnf.lark(notation), tokenizer())
        for answer in answers if not grammar.fault(matcher) else ():
            assert fits(notation, answer) == bool(re.fullmatch(expression, answer)), (notation, answer)


@settings(max_examples=200, deadline=None)
@given(st.text('ro:="[]()|*{}1,a\\#\n .-^<', max_size=30).map("root ::= ".__add__) | st.text(max_size=20))
def test_any_text_is_a_grammar_or_a_fault(text: str) -> None:
    try:
        assert gbnf.lark(text).startswith("start: ")
    except ValueError as error:
        assert str(error) and len(str(error)) < 200


def test_blanks_are_read_once() -> None:
    """16,000 after an opening brace took 5 s of the event loop; now they take under a millisecond."""
    began = time.thread_time()
    for text in ('root ::= "a"{' + " " * 16_000, 'root ::= "a"{1,' + " " * 16_000):
        with pytest.raises(ValueError, match="no part of a grammar"):
            gbnf.lark(text)
    assert time.thread_time() - began < 1


def test_the_deepest_is_written() -> None:
    """Brackets and repetitions at their limits, without a RecursionError."""
    assert gbnf.lark("root ::= " + "(" * 24 + '"a"' + ")?*+{2}" * 24).count("(") >= 24


def test_large_grammars_take_linear_time() -> None:
    """Only a guard against hangs: each takes milliseconds."""
    began = time.monotonic()
    for text in ("root ::= " + '"a"? ' * 3000, "\n".join(
            ["root ::= r0", *(f'r{at} ::= r{at + 1} | r{at + 1} "x"' for at in range(490)), 'r490 ::= "y"'])):
        gbnf.lark(text)
    assert time.monotonic() - began < 20
