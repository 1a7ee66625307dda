"""Parses bodies of requests into the structs of `schema.py`; errors name the field.

msgspec says where a body differs from its definition; the definition gives the allowed values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar

import msgspec
import orjson
from msgspec import inspect

from epdd.errors import BadRequest
from epdd.frontend.http import json_cost
from epdd.frontend.requests import fields, inline_files
from epdd.frontend.requests.inline_files import InlineLimits

FIELDS_MAX = 1000           # of the body itself
_NAME_CHARS_MAX = 100       # of a name in a message
_VALUE_OF = "a value of "

T = TypeVar("T", bound=msgspec.Struct)
_WHERE = re.compile(r"`\$(?P<path>[^`]*)`$")
_FIELD = re.compile(r"(?:missing required|unknown) field `(?P<name>.*?)`(?: - at|$)", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")


def parse(body: bytes | bytearray, kind: type[T], strict: bool, limits: InlineLimits = InlineLimits()
          ) -> tuple[T, tuple[str, ...]]:
    """The body and the names of its fields that have no effect.

    Raises BadRequest with `param`; if `strict`, for unknown fields too.  Raises ContextLength or MediaError
    if its text or an image is over `limits`.
    """
    extracted = inline_files.extract(body, limits)
    data = _loads(extracted)
    if not extracted.restore(data):
        # A data: URL outside an image is text.
        if len(body) > limits.text_bytes:
            raise BadRequest("A data: URL stands where no image can be")
        data = _loads(inline_files.Extracted(body))
    if not isinstance(data, dict):
        raise BadRequest("The body must be a JSON object")
    if len(data) > FIELDS_MAX:
        raise BadRequest(f"The body has over {FIELDS_MAX} fields")
    ignored = fields.ignored(data, kind.__struct_fields__, strict)
    try:
        return msgspec.convert(data, kind), ignored
    except msgspec.ValidationError as error:
        _refuse(str(error), kind, data)


def _loads(extracted: inline_files.Extracted) -> Any:
    json_cost.check(extracted.text, "The body")
    try:
        return orjson.loads(extracted.text)
    except orjson.JSONDecodeError as error:
        # The decoder's message does not quote the input.
        raise BadRequest(f"The body is not valid JSON: {error.msg} (byte {extracted.place(error.pos)})") from None


@dataclass
class _Place:
    """A place in a body: its path, its value and its definition."""

    where: str
    value: Any
    node: inspect.Type | None


def _refuse(message: str, kind: type[msgspec.Struct], data: Any) -> NoReturn:
    """Raises BadRequest with a message of its own: msgspec's may quote the request at any length."""
    place = _place(message, kind, data)
    field = _FIELD.search(message)
    if field and field["name"] != "type":       # without its type a part's fields are not known
        name = field["name"][:_NAME_CHARS_MAX]
        known = (field.encode_name for struct in _structs(place.node) for field in struct.fields)
        place = _Place(f"{place.where}.{name}".lstrip("."), None, _below(place.node, name))
        if message.startswith("Object contains unknown"):
            raise BadRequest(f"{place.where} is not known; allowed: {', '.join(known)}", param=place.where)
    param = place.where.removeprefix(_VALUE_OF) or None
    words = _words(place.node)
    if not words:
        raise BadRequest(f"{place.where} is not supported", param=param)
    if re.match(r"Expected `(int|float)` [<>]", message) and place.value is not None:
        raise BadRequest(f"{place.where} is {str(place.value)[:30]}; it must be {_range(place.node)}", param=param)
    raise BadRequest(f"{place.where or 'The body'} must be {words}", param=param)


def _place(message: str, kind: type[msgspec.Struct], data: Any) -> _Place:
    """The end of msgspec's path, which does not name the key in an object with arbitrary keys."""
    found = _WHERE.search(message)
    # Not finditer: under memory pressure CPython 3.11's keeps an object of each call, which pins a megabyte.
    steps = _STEP.findall(found["path"]) if found else []
    if steps and steps[-1][0] == "type" and message.startswith("Invalid value"):
        steps.pop()         # the fault lies in the part, not in its type
    place = _Place("", data, _definition(kind))
    for name, index in steps:
        if index == "...":
            return _Place(_VALUE_OF + place.where, None, _below(place.node, "..."))
        step = f".{name}" if name else f"[{index}]"
        place = _Place((place.where + step).lstrip("."), place.value[name or int(index)], _below(place.node, name or 0))
    return place


@cache
def _definition(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _plain(node: inspect.Type | None) -> Iterator[inspect.Type]:
    """The types that a value may have, without null."""
    if isinstance(node, inspect.Metadata):
        yield from _plain(node.type)
    elif isinstance(node, inspect.UnionType):
        for one in node.types:
            yield from _plain(one)
    elif node is not None and not isinstance(node, inspect.NoneType):
        yield node


def _structs(node: inspect.Type | None) -> Iterator[inspect.StructType]:
    return (one for one in _plain(node) if isinstance(one, inspect.StructType))


def _below(node: inspect.Type | None, step: str | int) -> inspect.Type | None:
    """The definition of a field ("name"), a list's items (0) or an object's values ("...")."""
    for one in _plain(node):
        if isinstance(one, inspect.ListType) and step == 0:
            return one.item_type
        if isinstance(one, inspect.DictType) and step == "...":
            return one.value_type
        if isinstance(one, inspect.StructType):
            for field in one.fields:
                if field.encode_name == step:
                    return field.type
    return None


def _words(node: inspect.Type | None) -> str:
    """The allowed values, as words after "must be"; empty if only null is allowed."""
    words, tags = [], []
    for one in _plain(node):
        if isinstance(one, inspect.StructType):
            if one.tag:
                tags.append(str(one.tag))
            else:
                words.append("an object")
        elif isinstance(one, (inspect.IntType, inspect.FloatType)):
            kind = "an integer" if isinstance(one, inspect.IntType) else "a number"
            words.append(f"{kind}, {_range(one)}".removesuffix(", "))
        elif isinstance(one, inspect.StrType):
            words.append("a string" + _size(one.min_length, one.max_length, "characters"))
        elif isinstance(one, inspect.ListType):
            words.append("a list" + _size(one.min_length, one.max_length, "items"))
        elif isinstance(one, inspect.DictType):
            words.append("an object" + _size(one.min_length, one.max_length, "names"))
        elif isinstance(one, inspect.BoolType):
            words.append("true or false")
        elif isinstance(one, inspect.LiteralType):
            words.append("one of " + ", ".join(map(str, one.values)))
    if tags:
        words.append("an object with a type of " + ", ".join(tags))
    return " or ".join(dict.fromkeys(words))


def _range(node: inspect.Type | None) -> str:
    for one in _plain(node):
        if isinstance(one, (inspect.IntType, inspect.FloatType)):
            if one.gt is not None:
                return f"over {one.gt}" + (f" and at most {one.le}" if one.le is not None else "")
            if one.ge is not None:
                return f"from {one.ge} to {one.le}" if one.le is not None else f"at least {one.ge}"
    return ""


def _size(low: int | None, high: int | None, what: str) -> str:
    if low and high:
        return f" of {low} to {high} {what}" if low != high else f" of length {low}"
    return f" of {low} or more {what}" if low else f" of at most {high} {what}" if high else ""
