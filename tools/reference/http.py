"""docs/reference/http.md: the OpenAPI document as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tools.reference.text import note, table

from epdd.frontend.api import openapi
from epdd.frontend.requests.field_table import HONOURED

Json = dict[str, Any]
BODIES = ("ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody")

HEAD = """\
# HTTP

`GET /openapi.json` on a running daemon has all of this for programs, with the names of its models. POST paths work
with and without `/v1`. If the server has API keys, requests need `Authorization: Bearer KEY`; `/health`, `/ready`,
`/ping` and the files of the chat page do not. Every answer carries the request's id as `x-request-id`: the client's
own if it sent one.

[Request fields](fields.md) says what each field of a completion does. [Error codes](errors.md) lists `error.code`.
"""


def http() -> str:
    document = openapi.document(["demo"], keyed=True)
    schemas = document["components"]["schemas"]
    parts = [note("/openapi.json"), HEAD]
    for path, methods in document["paths"].items():
        if f"/v1{path}" not in document["paths"]:       # the same without /v1
            parts += [_operation(method, path, operation, schemas) for method, operation in methods.items()]
    parts.append("## Objects\n")
    parts += [f"### {name}\n\n{_fields(schema, {})}" for name, schema in schemas.items()
              if name not in BODIES and schema["properties"]]
    return "\n".join(parts)


def _operation(method: str, path: str, operation: Json, schemas: Json) -> str:
    text = f"## {method.upper()} {path}\n\n{operation['summary']}.\n\n"
    if "requestBody" in operation:
        body = _name(operation["requestBody"]["content"]["application/json"]["schema"])
        completion = body in ("ChatBody", "CompletionBody")
        text += _fields(schemas[body], {name: row[1] for name, row in HONOURED.items()} if completion else {}) + "\n"
    return text + table(("status", "when", "answer"), (
        (status, answer["description"], ", ".join(_kinds(answer["content"])))
        for status, answer in operation["responses"].items()))


def _kinds(content: Json) -> Iterator[str]:
    for kind, value in content.items():
        named = "$ref" in value["schema"] and _name(value["schema"]) != "OpenApi"
        yield _link(_name(value["schema"])) if named else f"`{kind}`"


def _fields(schema: Json, texts: Mapping[str, str]) -> str:
    """A row for each field that has an effect; `texts` are for those that the schema does not describe."""
    needed = schema.get("required", ())
    rows = []
    for name, value in schema["properties"].items():
        about = value.get("description", texts.get(name, ""))
        if not about.startswith(("Not supported", "No effect")):
            kind = "text" if name == "model" else _kind(value)      # its values are the running daemon's
            rows.append((f"`{name}`" + (" (needed)" if name in needed else ""), kind, about))
    return table(("field", "type", ""), rows)


def _name(schema: Json) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _kind(schema: Json) -> str:
    """A short name of a type."""
    if "$ref" in schema:
        return _link(_name(schema))
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each) for each in schema["anyOf"] if each.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    kind = {"array": "list", "string": "text", "boolean": "true or false"}.get(
        schema.get("type", "any"), schema.get("type", "any"))
    if kind == "list" and schema.get("items"):
        kind = f"list of {_kind(schema['items'])}"
    return kind + _range(schema)


def _range(schema: Json) -> str:
    low, high = (schema.get(f"{side}imum", schema.get(f"exclusive{side.title()}imum")) for side in ("min", "max"))
    low, high = (bound if bound is not None and abs(bound) < 1 << 31 else None for bound in (low, high))
    above = "above " if "exclusiveMinimum" in schema else ""
    if high is not None:
        return f", {above}{low:g} to {high:g}"
    if low is not None:
        return f", {above}{low:g} or more"
    most = schema.get("maxLength", schema.get("maxItems", schema.get("maxProperties")))
    return f", at most {most:,}" if most else ""
