"""The format of an answer, in every server's fields: a JSON schema, a regular expression, a choice or a grammar.

Each becomes llguidance's Lark here, after checks of shape and size; `structured_output.check` has it compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from epdd.errors import BadRequest
from epdd.frontend.http import json_cost
from epdd.frontend.structured import gbnf
from epdd.frontend.structured.tool_schema import REGEX_CHARS_MAX, schema

# llguidance takes up to half a second of a worker to compile this much, and the time grows with the square.
EBNF_CHARS_MAX = 16 << 10
LARK_CHARS_MAX = 8 << 10        # Lark needs half the characters of EBNF
# A chain of 2,000 rules ends the process: llguidance's compiler recurses for each.  Every rule of Lark has a colon.
COLONS_MAX = 500
CHOICES_MAX = 2000
CHOICE_CHARS_MAX = 64 << 10     # of all together

_ANY_OBJECT = {"type": "object"}
# Fields that are a format by themselves -> its kind.
_SPELLINGS = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
              "json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar", "format": "json"}
FIELDS = ("response_format", "structured_outputs", *_SPELLINGS)
# Keys of vLLM's structured_outputs besides the formats; refused if set, because the spacing of JSON is fixed.
_SPACING = ("disable_any_whitespace", "disable_fallback", "disable_additional_properties", "whitespace_pattern")
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)

_Json = dict[str, Any]


@dataclass(frozen=True)
class ResponseFormat:
    """A format as Lark."""

    param: str                  # the field that requests it
    lark: str                   # a term, or a whole grammar with its own start
    whole: bool = False         # `lark` is a whole grammar

    @property
    def grammar(self) -> str:
        return self.lark if self.whole else f"start: {self.lark}"


def parse(data: _Json) -> ResponseFormat | None:
    """The format that a request's fields ask for; None: any text.

    Raises BadRequest naming the field, also if two fields ask for a format.
    """
    found: ResponseFormat | None = None
    for param, kind, value in _requested(data):
        if found:
            raise BadRequest(f"{found.param} and {param} ask for two formats of one answer; send one of them",
                             param=param)
        found = _format(param, kind, value)
    return found


def _requested(data: _Json) -> Iterator[tuple[str, str, Any]]:
    """(field, kind, value) of each format that is requested."""
    yield from _response_format(data.get("response_format"))
    outputs = data.get("structured_outputs") or {}
    for key, value in outputs.items():
        if key in _SPACING or key == "structural_tag":
            if value is not None and value is not False:
                raise BadRequest(f"structured_outputs.{key[:40]} is not supported; "
                                 + ("use tools" if key == "structural_tag" else "leave it out"),
                                 param=f"structured_outputs.{key}")
        elif key in ("json", "regex", "choice", "grammar", "json_object"):
            if value is not None and value is not False and value != "":
                yield f"structured_outputs.{key}", key, value
        elif key != "backend":
            raise BadRequest(f"structured_outputs has no field {key[:100]}", param="structured_outputs")
    for name, kind in _SPELLINGS.items():
        value = data.get(name)
        if name == "format" and value == "json":
            yield name, "json_object", True
        elif value is not None and value != "":
            yield name, kind, value


def _format(param: str, kind: str, value: Any) -> ResponseFormat:
    if kind == "json_object":
        if value is not True:
            raise BadRequest(f"{param} must be true or false", param=param)
        return ResponseFormat(param, schema(_ANY_OBJECT, True, param))
    if kind == "json":
        return ResponseFormat(param, schema(_schema(value, param), True, param))
    if kind == "choice":
        return ResponseFormat(param, _choice(value, param))
    if not isinstance(value, str):
        raise BadRequest(f"{param} must be a string", param=param)
    if kind == "regex":
        return ResponseFormat(param, _regex(value, param))
    return ResponseFormat(param, _grammar(value, param), whole=True)


def _schema(value: Any, param: str) -> _Json:
    """From an object, or a string of JSON."""
    if isinstance(value, str):
        json_cost.check(value.encode(), param)
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"{param} is not valid JSON: {error.msg}", param=param) from None
    if not isinstance(value, dict):
        raise BadRequest(f"{param} must be a JSON schema, an object", param=param)
    return value


def _choice(value: Any, param: str) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise BadRequest(f"{param} must be a list of one or more strings", param=param)
    chars = sum(map(len, value))
    if len(value) > CHOICES_MAX or chars > CHOICE_CHARS_MAX:
        raise BadRequest(f"{param} holds {len(value)} strings of {chars} characters; at most {CHOICES_MAX} of "
                         f"{CHOICE_CHARS_MAX} are allowed", param=param)
    # One expression: 9,000 alternatives of a rule take four times as long.
    return "/" + "|".join(_slashed(_quoted(text)) for text in value) + "/"


def _quoted(text: str) -> str:
    """A regular expression that matches this text alone."""
    return "".join(char if char.isalnum() or char == " " or ord(char) > 127 else f"\\x{{{ord(char):x}}}"
                   for char in text) or "()"


def _regex(value: str, param: str) -> str:
    if len(value) > REGEX_CHARS_MAX:
        raise BadRequest(f"{param} has {len(value)} characters; at most {REGEX_CHARS_MAX} are allowed", param=param)
    # The whole answer must match, so anchors at the ends are redundant; llguidance has none.
    value = value.removeprefix("^")
    if value.endswith("$") and (len(value) - len(value[:-1].rstrip("\\"))) % 2:
        value = value[:-1]
    return f"/{_slashed(value) or '()'}/"


def _slashed(regex: str) -> str:
    """Escaped for a place between slashes on one line."""
    return _SLASH.sub(lambda found: {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0]), regex)


def _grammar(value: str, param: str) -> str:
    most = EBNF_CHARS_MAX if "::=" in value else LARK_CHARS_MAX
    if len(value) > most:
        raise BadRequest(f"{param} has {len(value)} characters; at most {most} are allowed", param=param)
    if "::=" in value:
        try:
            return gbnf.lark(value)
        except ValueError as error:
            raise BadRequest(f"{param}: {error}", param=param) from None
    if value.count(":") > COLONS_MAX:
        raise BadRequest(f"{param} has over {COLONS_MAX} colons; each rule has one", param=param)
    return value


def _response_format(value: Any) -> Iterator[tuple[str, str, Any]]:
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise BadRequest("response_format must be an object with the type text, json_object or json_schema",
                         param="response_format")
    for name, given in value.items():
        if given is not None and name not in ("type", "json_schema" if kind == "json_schema" else "type"):
            raise BadRequest(f"response_format of type {kind} has no field {name[:100]}", param="response_format")
    if kind == "json_object":
        yield "response_format", "json_object", True
    elif kind == "json_schema":
        yield "response_format", "json", _json_schema(value.get("json_schema"))


def _json_schema(value: Any) -> _Json:
    if not isinstance(value, dict) or not isinstance(value.get("schema"), dict):
        raise BadRequest("response_format.json_schema must be an object with a schema, an object itself",
                         param="response_format")
    for name, kind, word in (("name", str, "a string"), ("description", str, "a string"),
                             ("strict", bool, "true or false")):
        if not (value.get(name) is None or isinstance(value[name], kind)):
            raise BadRequest(f"response_format.json_schema.{name} must be {word}", param="response_format")
    for name in value.keys() - {"name", "description", "schema", "strict"}:
        raise BadRequest(f"response_format.json_schema has no field {name[:100]}", param="response_format")
    answer: _Json = value["schema"]
    return answer
