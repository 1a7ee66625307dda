"""Response formats in every server's fields: matching answers, and refusals that name the field."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import llguidance
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epdd import grammar
from epdd.errors import BadRequest
from epdd.families import ModelInfo
from epdd.frontend.requests import completion_requests
from epdd.frontend.structured import response_format, structured_output
from epdd.frontend.structured.tool_schema import REGEX_CHARS_MAX

from tests.frontend.structured.checking import check

OBJECT = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"],
          "additionalProperties": False}
LARK = 'start: "one " SHAPE\nSHAPE: "circle" | /sq[uv]are/'
EBNF = 'root ::= "one " ("circle" | "sq" [uv] "are")'
SPELLINGS = {
    "json": [{"structured_outputs": {"json": OBJECT}}, {"structured_outputs": {"json": json.dumps(OBJECT)}},
             {"guided_json": OBJECT}, {"guided_json": json.dumps(OBJECT)}, {"json_schema": json.dumps(OBJECT)},
             {"json_schema": OBJECT}, {"format": OBJECT},
             {"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}}],
    "any": [{"structured_outputs": {"json_object": True}}, {"format": "json"},
            {"response_format": {"type": "json_object"}}],
    "regex": [{"structured_outputs": {"regex": "a/+b"}}, {"guided_regex": "^a/+b$"}, {"regex": "a/+b"}],
    "choice": [{"structured_outputs": {"choice": ["red", "a/b"]}}, {"guided_choice": ["red", "a/b"]}],
    "grammar": [{name: text} for name in ("guided_grammar", "ebnf", "grammar") for text in (LARK, EBNF)]
    + [{"structured_outputs": {"grammar": text, "json": None, "backend": "x"}} for text in (LARK, EBNF)],
}
ANSWERS = {"json": ('{"at": 5}', '{"a": 5}'), "any": ('{"x": [1]}', "5"), "regex": ("a//b", "ab"),
           "choice": ("a/b", "a"), "grammar": ("one sqvare", "one")}


@cache
def tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def fits(sent: dict[str, Any], answer: str) -> bool:
    form = response_format.parse(sent)
    assert form
    matcher = grammar.begin(form.grammar, tokenizer())
    assert not grammar.fault(matcher), grammar.fault(matcher)
    data = list(answer.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def refused(**sent: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        check(structured_output.parse(sent))
    assert caught.value.status == 400 and len(caught.value.message) < 300 and "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(("kind", "sent"), [(kind, sent) for kind, all in SPELLINGS.items() for sent in all],
                         ids=lambda value: str(value)[:40])
def test_every_spelling(kind: str, sent: dict[str, Any]) -> None:
    right, wrong = ANSWERS[kind]
    assert fits(sent, right) and not fits(sent, wrong)


def test_both_endpoints_take_them(family: ModelInfo) -> None:
    for sent in (all[0] for all in SPELLINGS.values()):
        chat = completion_requests.parse(orjson.dumps({"messages": [{"role": "user", "content": "a"}], **sent}), family,
                                         ("m",))[0]
        text = completion_requests.parse_text(orjson.dumps({"prompt": "a", **sent}), family, ("m",))[0]
        assert chat.sampling.grammar == text.sampling.grammar == text.structure.grammar != ""


def test_what_asks_for_nothing() -> None:
    for sent in ({}, {"structured_outputs": {}}, {"guided_regex": ""}, {"format": ""}, {"regex": None},
                 {"structured_outputs": {"json_object": False, "regex": None, "disable_any_whitespace": False}},
                 {"response_format": {"type": "text"}}):
        assert response_format.parse(sent) is None


@pytest.mark.parametrize(("sent", "param"), [
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"guided_json": "{"}, "guided_json"), ({"guided_json": "[]"}, "guided_json"),
    ({"guided_json": {"type": 5}}, "guided_json"), ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"other": 1}}, "structured_outputs"),
    ({"guided_choice": []}, "guided_choice"), ({"structured_outputs": {"choice": ["a", 1]}},
                                               "structured_outputs.choice"),
    ({"guided_choice": ["a"] * 2001}, "guided_choice"), ({"guided_choice": ["a" * 70_000]}, "guided_choice"),
    ({"guided_regex": "(?=a)a"}, "guided_regex"), ({"regex": "(a)\\1"}, "regex"), ({"regex": "("}, "regex"),
    ({"regex": "a)b"}, "regex"), ({"regex": "a" * (REGEX_CHARS_MAX + 1)}, "regex"), ({"regex": "[^\\s\\S]"}, "regex"),
    ({"grammar": "root ::= b"}, "grammar"), ({"grammar": "start: b"}, "grammar"), ({"ebnf": "nonsense"}, "ebnf"),
    ({"grammar": "x: \"a\""}, "grammar"), ({"grammar": "start: <|im_end|>"}, "grammar"),
    ({"grammar": "start: \"a\"" + " " * 20_000}, "grammar"), ({"grammar": "root ::= root"}, "grammar"),
    # A chain so long would end the process that compiles it.
    ({"grammar": "\n".join(["start: a0", *(f'a{at}: a{at + 1}' for at in range(600)), 'a600: "y"'])}, "grammar"),
    ({"grammar": "\n".join(f"r{at} ::= r{at + 1}" for at in range(600))}, "grammar"),
    ({"guided_json": {"type": "string", "pattern": "a?" * 3000}}, "guided_json"),
    ({"grammar": LARK, "tools": [{"type": "function", "function": {"name": "x"}}]}, "grammar"),
], ids=lambda value: str(value)[:50])
def test_refusals_name_the_field(sent: dict[str, Any], param: str) -> None:
    error = refused(**sent)
    assert error.param == param and param.partition(".")[0] in error.message


def test_a_fault_of_an_expression_is_told_in_its_own_words() -> None:
    assert refused(regex="(a)\\1").message == "regex: regular expression: backreferences are not supported"


@pytest.mark.parametrize(("regex", "right", "wrong"), [
    ("a|bc", "bc", "abc"), ("a\\$", "a$", "a"), ("^a\\\\$", "a\\", "a$"), ("[^/]\\/x", "a/x", "//x"),
    ("a\nb", "a\nb", "a b"), (".*?b", "aab", "a"), ("(?i)red", "RED", "RE"), ("\\d{2}", "42", "4"),
])
def test_expressions_match_the_whole_answer(regex: str, right: str, wrong: str) -> None:
    assert fits({"regex": regex}, right) and not fits({"regex": regex}, wrong)


def test_an_expression_beside_tools() -> None:
    """The answer is a call, or matches."""
    structure = structured_output.parse({"regex": "a/b", "tools": [{"type": "function", "function": {"name": "x"}}]})
    matcher = grammar.begin(structure.grammar, tokenizer())
    assert matcher.consume_tokens(list(b"a/b")) and matcher.is_accepting()
    matcher = grammar.begin(structure.grammar, tokenizer())
    assert matcher.consume_tokens(list(b"<tool_call>"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=8), min_size=1, max_size=4))
def test_any_texts_can_be_chosen_from(texts: list[str]) -> None:
    for text in texts:
        assert fits({"guided_choice": texts}, text)
    assert fits({"guided_choice": texts}, texts[0] + "x") == (texts[0] + "x" in texts)
