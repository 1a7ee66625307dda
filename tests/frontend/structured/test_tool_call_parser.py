"""Calls are separated from streamed text; its pieces do not matter."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from epdd.frontend.structured.tool_call_parser import BETWEEN, CLOSE, HEAD, OPEN, CallDelta, CallParser

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": [1, 2]}}\n</tool_call>'
TEXT = st.text(st.sampled_from("ab <>\n{}\"tool_cal/"), max_size=20).filter(lambda text: OPEN not in text)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from([OPEN, CLOSE]),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                    max_leaves=5)
ARGUMENTS = st.dictionaries(st.text(max_size=5), JSON, max_size=3).map(lambda value: json.dumps(value))
CALLS = st.lists(st.tuples(st.sampled_from(["look", "a-b_C9"]), ARGUMENTS), max_size=3)


def assembled(pieces: list[str]) -> tuple[str, list[tuple[str, str]], bool]:
    """Text, calls and whether the last is open, put together as a client does."""
    parser, text = CallParser(), ""
    calls: list[list[str]] = []
    ids = set()
    for parsed in [*map(parser.push, pieces), parser.end()]:
        text += parsed.text
        for call in parsed.calls:
            if call.id:
                ids.add(call.id)
                assert call.index == len(calls)
                calls.append([call.name, call.arguments])
            else:
                assert not call.name and call.index == len(calls) - 1
                calls[call.index][1] += call.arguments
    assert len(ids) == len(calls) == parser.calls and all(name.startswith("call_") for name in ids)
    return text, [(name, arguments) for name, arguments in calls], parser.inside


def written(calls: list[tuple[str, str]]) -> str:
    return BETWEEN.join(OPEN + HEAD[0] + name + HEAD[1] + arguments + CLOSE for name, arguments in calls)


@given(TEXT, CALLS, st.data())
def test_any_cut_gives_the_same(text: str, calls: list[tuple[str, str]], data: st.DataObject) -> None:
    whole = text + written(calls)
    whole = whole[:data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole    # cut by its length
    rest, pieces = whole, []
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    got = assembled(pieces)
    assert got == assembled([whole]) == assembled(list(whole))
    if whole == text + written(calls):
        assert got == (text.rstrip() if calls else text, calls, False)
    else:
        assert got[0].startswith(text.rstrip()[:len(whole)].rstrip()) and len(got[1]) <= len(calls)


def test_arguments_are_told_as_they_come() -> None:
    parser = CallParser()
    got: list[Any] = [parser.push(piece) for piece in (CALL[:20], CALL[20:42], CALL[42:50], CALL[50:])]
    first = got[1].calls[0]
    assert (first.index, first.name, first.arguments) == (0, "look", "")
    assert "".join(call.arguments for parsed in got for call in parsed.calls) == '{"at": [1, 2]}'
    assert got[2].calls == [CallDelta(0, CALL[42:50])]


def test_text_is_not_held_longer_than_needed() -> None:
    parser = CallParser()
    pieces = ("a ", "b <", "tool", "box>", " ", "\n")
    assert [parser.push(piece).text for piece in pieces] == ["a", " b", "", " <toolbox>", "", ""]
    assert parser.end().text == " \n"


def test_a_call_cut_before_its_arguments_is_text() -> None:
    assert assembled(["so <tool_call>\n{\"na"]) == ("so<tool_call>\n{\"na", [], True)


def test_a_call_cut_in_its_arguments_keeps_them() -> None:
    assert assembled([CALL[:50]]) == ("", [("look", CALL[42:50])], True)
