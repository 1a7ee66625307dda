"""response_format and the tool fields: refusals and their fields, before any worker is involved."""

from __future__ import annotations

import random
from typing import Any

import pytest

from epdd.errors import BadRequest
from epdd.frontend.structured import structured_output
from epdd.frontend.structured.structured_output import StructuredOutput
from tests.models import schemas

from tests.frontend.structured.checking import check

OBJECT = {"type": "object", "properties": {"at": {"type": "integer"}}}
PROPERTIES = {f"p{at}": {} for at in range(500)}
LOOK = {"type": "function", "function": {"name": "look", "parameters": OBJECT}}


def prepared(**fields: Any) -> StructuredOutput:
    """As the endpoint does it: shapes, then compiling."""
    structure = structured_output.parse(fields)
    check(structure)
    return structure


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        prepared(**fields)
    error = caught.value
    assert error.param and error.param.partition("[")[0].partition(".")[0] in error.message
    assert len(error.message) < 300 and "\n" not in error.message and "x-guidance\":" not in error.message
    return error


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def tool(name: Any = "look", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def nested(depth: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


def doubling(rule: str, depth: int) -> Any:
    """A short schema that expands exponentially."""
    step = {f"a{at}": {rule: [{"anyOf": [{"type": "string"}, {"$ref": f"#/$defs/a{at + 1}"}]},
                              {"anyOf": [{"type": "integer"}, {"$ref": f"#/$defs/a{at + 1}"}]}]} for at in range(depth)}
    return {"$defs": {**step, f"a{depth}": {"type": "string"}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize("value", [
    5, "json_object", [], {}, {"type": "xml"}, {"type": None}, {"json_schema": {"schema": OBJECT}},
    {"type": "json_schema"}, {"type": "json_schema", "json_schema": None}, {"type": "json_schema", "schema": OBJECT},
    {"type": "json_schema", "json_schema": {"name": "x"}}, {"type": "json_object", "schema": OBJECT},
    {"type": "text", "json_schema": {"schema": OBJECT}},
    {"type": "json_schema", "json_schema": {"name": 5, "schema": OBJECT}},
    {"type": "json_schema", "json_schema": {"strict": "yes", "schema": OBJECT}},
    {"type": "json_schema", "json_schema": {"schema": OBJECT, "more": 1}},
    form("x"), form([]), form(True), form({"type": "banana"}), form({"type": 5}),
    form({"type": "object", "properties": {"a": "string"}}), form({"type": "object", "properties": []}),
    form({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}),
    form({"type": "string", "pattern": "(?=a)b"}), form({"type": "string", "format": "banana"}),
    form({"$ref": "#"}), form({"$ref": "#/$defs/nowhere"}), form({"$ref": "http://example.com/schema"}),
    form({"$ref": "file:///etc/passwd"}),
    form({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    form({"type": "array", "uniqueItems": True}), form({"not": {"type": "string"}}), form({"enum": []}),
    form({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}),
    form({"type": "integer", "minimum": 5, "maximum": 3}), form({"type": "string", "pattern": "x", "maxLength": 0}),
    form({"type": "object", "x-guidance": {"lenient": True}, "uniqueItems": True}),
    form(nested(200)), form(nested(400)), form({"type": "object", "properties": {f"p{at}": {} for at in range(501)}}),
    form({"anyOf": [{"type": "object", "properties": PROPERTIES, "allOf": [{"enum": [at]}]} for at in range(99)]}),
    form({"$defs": {"a": {"properties": PROPERTIES}},
          "anyOf": [{"allOf": [{"$ref": "#/$defs/a"}, {"required": [f"z{at}"]}]} for at in range(99)]}),
    form({"enum": [f"value {at}" for at in range(6000)]}), form(doubling("allOf", 25)),
], ids=lambda value: str(value)[:60])
def test_bad_formats(value: Any) -> None:
    assert refused(response_format=value).param == "response_format"


@pytest.mark.parametrize("schema", [
    {"type": "string", "minLength": 10 ** 9}, {"type": "string", "maxLength": 10 ** 9},
    {"type": "array", "items": {"type": "integer"}, "minItems": 10 ** 9},
    {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"}, {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
    nested(100), doubling("anyOf", 25), {"type": "object", "properties": PROPERTIES},
], ids=lambda value: str(value)[:60])
def test_hard_ones_are_taken_in_bounded_time(schema: Any) -> None:
    """None is expanded before an answer reaches it."""
    assert prepared(response_format=form(schema)).grammar


def test_schemas_as_libraries_make_them() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Shape", "description": "One.",
              "type": "object", "$defs": {"Kind": {"enum": ["circle", "square"], "title": "Kind", "type": "string"}},
              "properties": {"kind": {"$ref": "#/$defs/Kind"},
                             "size": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None}}}
    structure = prepared(response_format=form(schema))
    assert structure.grammar.startswith("start: %json {") and not structure.calls and not structure.tools


@pytest.mark.parametrize("seed", range(4))
def test_random_schemas_are_taken(seed: int) -> None:
    for kind in schemas.KINDS:
        assert prepared(response_format=form(kind(random.Random(seed))))


def test_text_asks_nothing() -> None:
    for value in (None, {"type": "text"}, {"type": "text", "json_schema": None}):
        assert prepared(response_format=value) == StructuredOutput()


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": {}}, "tools"),
    ({"tools": [tool(f"f{at}") for at in range(129)]}, "tools"),
    ({"tools": [LOOK, 5]}, "tools[1]"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
    ({"tools": [tool(5)]}, "tools[0]"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("two words")]}, "tools[0].function.name"),
    ({"tools": [tool('x", "y')]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [LOOK, LOOK]}, "tools[1].function.name"),
    ({"tools": [tool(description=5)]}, "tools[0].function.description"),
    ({"tools": [tool(strict="no")]}, "tools[0].function.strict"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [LOOK, tool("see", parameters={"properties": {"a": "b"}})]}, "tools[1].function.parameters"),
    ({"tools": [LOOK, tool("see", parameters={"properties": {"a": {"pattern": "(", "type": "string"}}})]},
     "tools[1].function.parameters"),
    ({"tools": [tool(parameters={"properties": {"a": {"uniqueItems": True}}}, strict=True)]},
     "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"x-guidance": {}})]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"enum": ["x" * 70_000]})]}, "tools[0].function.parameters"),
    ({"tools": [tool(f"f{at}", parameters={"description": "x" * 60_000}) for at in range(3)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": 5}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "see"}}}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
], ids=lambda value: str(value)[:60])
def test_bad_tools(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_what_tools_need_no_grammar() -> None:
    for fields in ({}, {"tools": None, "tool_choice": None}, {"tools": []}, {"tool_choice": "none"},
                   {"tool_choice": "auto"}, {"tools": [LOOK], "tool_choice": "none"}):
        assert prepared(**fields) == StructuredOutput()


def test_tools_are_kept_for_the_template_as_they_came() -> None:
    bare = tool("see", description=None)
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"parallel_tool_calls": False}):
        structure = prepared(tools=[LOOK, bare], **choice)
        assert structure.tools == [LOOK, bare] and structure.calls and structure.grammar
    assert "parameters" not in bare["function"]


def test_many_tools_fit() -> None:
    parameters = {"properties": {f"p{at}": {"type": "string"} for at in range(10)}, "required": ["p0"]}
    assert prepared(tools=[tool(f"f{at}", parameters=parameters) for at in range(128)])


def test_definitions_are_a_tools_own() -> None:
    """Each schema refers into itself, whatever stands around it in the grammar."""
    one, two = ({"$defs": {"x": {"type": kind}}, "properties": {"a": {"$ref": "#/$defs/x"}}} for kind in ("string", 5))
    assert prepared(tools=[tool("one", parameters=one), tool("two", parameters=one)])
    assert refused(tools=[tool("one", parameters=one), tool("two", parameters=two)]).param == \
        "tools[1].function.parameters"


def test_what_only_a_tool_may_leave_to_the_model() -> None:
    """The model reads a tool's schema in its prompt; with strict all of it is enforced."""
    hard = {"properties": {"a": {"type": "array", "items": {}, "uniqueItems": True}}}
    assert prepared(tools=[tool(parameters=hard)])
    assert prepared(tools=[tool(parameters=hard, strict=False)])
    assert refused(tools=[tool(parameters=hard, strict=True)])


def test_a_format_and_tools_together() -> None:
    both = prepared(response_format=form(OBJECT), tools=[LOOK])
    assert len(both.terms) == 2 and "TEXT" not in both.grammar
    for choice in ("auto", "required"):
        assert refused(response_format=form({"type": 5}), tools=[LOOK], tool_choice=choice).param == "response_format"
    assert refused(response_format=form(OBJECT), tools=[tool(parameters={"properties": {"a": 5}})]).param == \
        "tools[0].function.parameters"
