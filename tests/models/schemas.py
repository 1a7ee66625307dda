"""Random JSON schemas of five kinds, with answers of bounded length, because a random model finds no end itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = ("id", "name", "colour", "size", "count", "left", "tags", "note", "größe", "a b", "x\"y")


def flat(rng: random.Random) -> Schema:
    """An object of plain fields, some of them optional."""
    names = rng.sample(WORDS, rng.randint(1, 5))
    return _object({name: _plain(rng) for name in names}, rng.sample(names, rng.randint(0, len(names))))


def nested(rng: random.Random, depth: int = 2) -> Schema:
    """Objects and arrays in each other."""
    if depth == 0:
        return _plain(rng)
    if rng.random() < 0.5:
        low = rng.randint(0, 2)
        return {"type": "array", "items": nested(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    names = rng.sample(WORDS, rng.randint(1, 3))
    return _object({name: nested(rng, depth - 1) for name in names}, names)


def choices(rng: random.Random) -> Schema:
    """Enumerations, constants and unions."""
    options: list[Schema] = [{"enum": rng.sample([1, 2.5, "a", "b\n", None, True, "ü", ["x"], {"k": 0}], 3)},
                             {"const": rng.choice(["c", 7, [1, {"d": None}]])},
                             {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
                             _object({"kind": {"const": "one"}, "value": _plain(rng)}, ["kind", "value"])]
    return _object({"pick": {"anyOf": rng.sample(options, 2)}, "other": rng.choice(options)}, ["pick", "other"])


def narrow(rng: random.Random) -> Schema:
    """Strings by pattern, format and length; numbers by bounds."""
    low = rng.randint(-500, 500)
    fields: list[Schema] = [
        {"type": "string", "pattern": rng.choice([r"^[A-Z]{2}-[0-9]{1,4}$", r"^(yes|no|maybe)$", r"^\d{3}(\.\d)?$"])},
        {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])},
        {"type": "string", "minLength": 2, "maxLength": rng.randint(2, 9)},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
        {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9, "multipleOf": rng.choice([1, 3])}]
    names = rng.sample(WORDS, len(fields))
    return _object(dict(zip(names, fields)), names)


def referring(rng: random.Random) -> Schema:
    """Definitions that refer to each other and to themselves."""
    children = {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2}
    tree = _object({"value": _plain(rng), "children": children,
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
                   rng.choice([["value"], ["value", "children"], ["value", "next"]]))
    return {"$defs": {"tree": tree, "leaf": _plain(rng)}, "$ref": "#/$defs/tree"}


KINDS: tuple[Callable[[random.Random], Schema], ...] = (flat, nested, choices, narrow, referring)


def _plain(rng: random.Random) -> Schema:
    return rng.choice([
        {"type": "string", "maxLength": rng.randint(0, 12)}, {"type": "integer", "minimum": -9, "maximum": 10_000},
        {"type": "boolean"}, {"type": "null"}, {"type": "number", "minimum": 0, "maximum": 1}])


def _object(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
