"""The table of fields agrees with the definitions, its page is current, and it is enforced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from epdd.errors import BadRequest
from epdd.families import ModelInfo
from epdd.frontend.requests import completion_requests, fields
from epdd.frontend.requests.field_table import HARMLESS, REFUSED, HONOURED
from epdd.frontend.requests.schema import ChatBody, CompletionBody

CHAT, TEXT = frozenset(ChatBody.__struct_fields__), frozenset(CompletionBody.__struct_fields__)
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "fields.md"


def chat(family: ModelInfo, strict: bool = False, **sent: Any) -> completion_requests.Chat:
    body = {"messages": [{"role": "user", "content": "hi"}], **sent}
    return completion_requests.parse(orjson.dumps(body), family, ("m",), strict)[0]


def test_the_table_and_the_definitions_agree() -> None:
    assert HONOURED.keys() == CHAT | TEXT
    # If only one endpoint has a field, the other refuses it with an alternative.
    assert CHAT ^ TEXT <= REFUSED.keys() and not REFUSED.keys() & CHAT & TEXT
    assert not HARMLESS.keys() & (REFUSED.keys() | CHAT | TEXT)


def test_the_page_is_current() -> None:
    assert PAGE.read_text().strip() == fields.page(ChatBody.__struct_fields__, CompletionBody.__struct_fields__).strip()
    assert all(f"| `{name}`" in PAGE.read_text() for name in (*HONOURED, *REFUSED, *HARMLESS))


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - CHAT))
def test_each_refused_field_says_the_way(family: ModelInfo, name: str) -> None:
    row, plain = REFUSED[name], chat(family)
    for value in (7.5, "other", ["x"], {"x": 1}):
        for strict in (False, True):
            with pytest.raises(BadRequest) as caught:
                chat(family, strict, **{name: value})
        assert caught.value.param == name and caught.value.status == 400
        assert caught.value.message == f"{name} is not supported: {row.instead}"
    for value in (None, *row.same):
        asked = chat(family, True, **{name: value})
        assert asked.ignored == (name,) and asked.sampling == plain.sampling and asked.structure == plain.structure


def test_values_that_only_look_the_same(family: ModelInfo) -> None:
    for sent in ({"mirostat": True}, {"best_of": True}, {"echo": 0}, {"n_predict": 0}, {"do_sample": False},
                 {"separate_reasoning": False}, {"repeat_penalty": 1.1}, {"truncation_side": "right"},
                 {"prompt_logprobs": -1}, {"prompt_logprobs": 0}, {"dry_multiplier": 1}, {"n_probs": 1}):
        with pytest.raises(BadRequest):
            chat(family, **sent)
    assert chat(family, repeat_penalty=1.0, mirostat=0.0, typical_p=1, best_of=1).ignored == (
        "best_of", "mirostat", "repeat_penalty", "typical_p")


def test_harmless_fields_of_any_value_are_taken_by_a_strict_server_too(family: ModelInfo) -> None:
    sent: dict[str, Any] = {name: value for name, value in zip(sorted(HARMLESS), [{"a": 1}, [1], "x", 0, True] * 20)}
    assert chat(family, strict=True, **sent).ignored == tuple(sorted(HARMLESS))


def test_the_other_endpoints_fields(family: ModelInfo) -> None:
    with pytest.raises(BadRequest, match="prompt is not supported: use messages"):
        chat(family, prompt="x")
    with pytest.raises(BadRequest, match="tools is not supported: use /v1/chat/completions"):
        completion_requests.parse_text(orjson.dumps({"prompt": "x", "tools": [{}]}), family, ("m",))


def test_fields_are_shown_where_the_api_is_described() -> None:
    shown = fields.properties(CHAT)
    assert shown.keys() == (REFUSED.keys() | HARMLESS.keys()) - CHAT
    assert shown["n_predict"] == {"enum": [None], "description": "Not supported: use max_tokens."}
