"""Which fields are honoured, refused because they would change the answer, or without effect.

`field_table.py` has the rows.  `python -m epdd.frontend.requests.fields` prints docs/reference/fields.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from epdd.errors import BadRequest
from epdd.frontend.requests.field_table import HARMLESS, REFUSED, HONOURED, Refused

_NAME_CHARS_MAX = 100       # of a name in a message

_HEAD = """<!-- Made from epdd.frontend.requests.field_table. Do not edit: run `make reference`. -->

# Request fields

This page lists every field that clients of OpenAI, vLLM, SGLang, llama.cpp and Ollama send to
`POST /v1/chat/completions` and `/v1/completions`. A field that would change the answer is honoured or refused with a
400. A field in none of these tables is ignored and counted in `epdd_ignored_fields_total`; with `server.strict` it is
refused. `null` is the same as absent. [HTTP](http.md) has types and ranges.
"""


def ignored(data: Mapping[str, Any], known: Collection[str], strict: bool) -> tuple[str, ...]:
    """Names of a body's fields that have no effect; `known` are the fields of its definition.

    Raises BadRequest for a refused field that would change the answer; if `strict`, for unknown fields too.
    """
    names = []
    for name in sorted(data.keys() - known):
        refused = REFUSED.get(name)
        if refused is not None:
            if not _changes_nothing(data[name], refused):
                raise BadRequest(f"{name} is not supported: {refused.instead}", param=name)
        elif strict and name not in HARMLESS:
            short = name[:_NAME_CHARS_MAX]
            raise BadRequest(f"{short} is not a field of this request, and this server refuses unknown fields "
                             "(server.strict)", param=short)
        names.append(name)
    return tuple(names)


def _changes_nothing(value: Any, refused: Refused) -> bool:
    """Whether a refused field has a value without effect.  In Python 0 equals False, in JSON it does not."""
    return value is None or any(value == same and isinstance(value, bool) == isinstance(same, bool)
                                for same in refused.same)


def properties(known: Collection[str]) -> dict[str, Any]:
    """JSON schemas of the fields that a body accepts besides those of its definition."""
    found: dict[str, Any] = {}
    for name, row in REFUSED.items():
        if name not in known:
            found[name] = {"enum": [None, *row.same], "description": f"Not supported: {row.instead}."}
    for name, (_, why) in HARMLESS.items():
        if name not in known:
            found[name] = {"description": f"No effect: {why}."}
    return found


def page(chat: Collection[str], text: Collection[str]) -> str:
    """docs/reference/fields.md; `chat` and `text` are the fields of the definitions of both endpoints."""
    return "\n".join([_HEAD, *_honoured(chat, text), *_refused(chat, text), *_harmless()])


def _honoured(chat: Collection[str], text: Collection[str]) -> Iterator[str]:
    yield "## Honoured\n"
    yield "| field | sent by | chat | text | what it does |\n|---|---|---|---|---|"
    for name, (senders, what) in sorted(HONOURED.items()):
        marks = " | ".join("yes" if name in kind else "" for kind in (chat, text))
        yield f"| `{name}` | {senders} | {marks} | {what} |"


def _refused(chat: Collection[str], text: Collection[str]) -> Iterator[str]:
    yield "\n## Refused\n\nA request with one of these gets a 400 that says what to use instead. `null` and the allowed"
    yield "values are ignored.\n"
    yield "| field | sent by | allowed values | use instead |\n|---|---|---|---|"
    for name, row in sorted(REFUSED.items()):
        allowed = ", ".join(f"`{_shown(value)}`" for value in row.same)
        only = " (text completions)" if name in chat else " (chat)" if name in text else ""
        yield f"| `{name}`{only} | {row.senders} | {allowed} | {row.instead.replace('|', '/')} |"


def _harmless() -> Iterator[str]:
    yield "\n## Without effect\n"
    yield "| field | sent by | why |\n|---|---|---|"
    for name, (senders, why) in sorted(HARMLESS.items()):
        yield f"| `{name}` | {senders} | {why} |"


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else f'"{value}"' if isinstance(
        value, str) else str(value)


if __name__ == "__main__":
    from epdd.frontend.requests.schema import ChatBody, CompletionBody
    print(page(ChatBody.__struct_fields__, CompletionBody.__struct_fields__))
