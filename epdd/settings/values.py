"""Types of settings, and how a value out of a file or a text becomes one of its type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta, Struct, inspect, structs

from epdd.errors import ConfigError
from epdd.settings.arguments import near

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Factor = Annotated[float, Meta(ge=0, le=1e9)]
Mode = Annotated[int, Meta(ge=0, le=0o777, extra={"show": oct})]       # of a file: who may read and write

_KINDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false", inspect.IntType: "a whole number", inspect.FloatType: "a number",
    inspect.StrType: "text", inspect.LiteralType: "text", inspect.VarTupleType: "a list of texts"}


def checked(kind: type[Struct], values: Mapping[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    """`values` as fields of `kind`.  Raises ConfigError naming `source` and the field, after `prefix`."""
    types = {field.name: field.type for field in structs.fields(kind)}
    for key in values:
        if key not in types:
            raise ConfigError(f"{source}: unknown setting {prefix}{key}{near(key, types)}")
    return {key: _converted(value, types[key], f"{source}: {prefix}{key}") for key, value in values.items()}


def bare(annotation: Any) -> tuple[inspect.Type, dict[str, Any]]:
    """A field's type without its metadata; its description, and what else it says of itself."""
    found, about = inspect.type_info(annotation), {}
    if isinstance(found, inspect.Metadata):
        about = (found.extra_json_schema or {}) | (found.extra or {})
        found = found.type
    if isinstance(found, inspect.LiteralType):
        found = inspect.LiteralType(get_args(annotation.__origin__))        # msgspec sorts them
    return (found.types[0] if isinstance(found, inspect.UnionType) else found), about


def _converted(value: Any, annotation: Any, where: str) -> Any:
    kind, about = bare(annotation)
    try:
        value = _read(value, kind)
        return msgspec.convert(value, annotation)
    except msgspec.ValidationError as error:
        item = re.search(r"`\$\[(\d+)\]`$", str(error))
        if item and "expected" in about and isinstance(value[int(item[1])], str):
            raise ConfigError(f"{where} has {value[int(item[1])]!r}; expected: {about['expected']}") from None
        wrong = _wrong(value, kind, about)
    except ValueError:          # of int() and float()
        wrong = f"{_KINDS[type(kind)]} expected"
    shown = "..." if where.endswith("api_keys") else _show(value, about)
    raise ConfigError(f"{where} is {shown}; {wrong}") from None


def _read(value: Any, kind: inspect.Type) -> Any:
    """What a text from the environment or the command line means; all else as it is."""
    match kind, value:
        case inspect.BoolType(), str():
            return {"true": True, "false": False}.get(value.lower(), value)
        case inspect.IntType(), str():
            return int(value, 0)
        case inspect.FloatType(), str():
            return float(value)
        case inspect.StrType(pattern=str()), int() | str() if not isinstance(value, bool):
            return str(value).strip()
        case inspect.VarTupleType(), list() | str():
            items = value.split(",") if isinstance(value, str) else value
            items = [item.strip() if isinstance(item, str) else item for item in items]
            return [item for item in items if item != ""]
    return value


def _show(value: Any, about: Mapping[str, Any]) -> str:
    return str(about.get("show", repr)(value) if isinstance(value, int) else repr(value))


def _wrong(value: Any, kind: inspect.Type, about: Mapping[str, Any]) -> str:
    """What `value` should be, by what is wrong with it."""
    match kind, value:
        case inspect.LiteralType(values=allowed), str() | None:
            return f"allowed: {', '.join(map(str, allowed))}"
        case inspect.StrType(pattern=str()), str():
            return f"expected: {about['expected']}"
        case inspect.StrType(pattern=str()), _:
            return "a number or text expected"
        case inspect.IntType() | inspect.FloatType(), int() | float() if not isinstance(value, bool):
            if kind.ge is not None and value < kind.ge:
                return f"at least {kind.ge}" if kind.ge else "it must not be negative"
            if kind.le is not None and value > kind.le:
                return f"at most {_show(int(kind.le), about)}"
    return f"{_KINDS[type(kind)]} expected"
