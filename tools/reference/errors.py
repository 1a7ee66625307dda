"""docs/reference/errors.md: the classes of epdd.errors, and the codes that the package gives them where it raises."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from tools.reference.text import note, table

import epdd
from epdd import errors
from epdd.errors import EpddError, StartupError

HEAD = """\
# Error codes

Every refusal has OpenAI's form:

```json
{"error": {"message": "...", "type": "invalid_request_error", "param": "messages", "code": "invalid_image"}}
```

`code` says what happened, `param` names the field, `message` is for people and may change. In a stream that has begun,
the same object comes as an event, and the stream ends. Statuses 429 and 503 carry `Retry-After` in seconds.
"""

# Messages of codes that are raised with a computed message.
ABOUT = {"invalid_image_url": "The address of an image is not allowed, or no address."}

STARTUP = """\
## At the start

The daemon and `epdd` end with an exit code and one sentence on stderr.
"""


def error_codes() -> str:
    classes = [found for found in vars(errors).values()
               if inspect.isclass(found) and issubclass(found, EpddError) and found is not EpddError]
    http = {(found.code, found.status, _about(found)) for found in classes
            if not issubclass(found, StartupError) and not _is_base(found)}
    http |= {("internal_error", 500, "A bug of the server. The fault is logged under the request's id.")}
    http |= set(_raised({found.__name__: found for found in classes}))
    rows = [(f"`{code}`", str(status), text) for code, status, text in sorted(http, key=lambda row: (row[1], row[0]))]
    starts = [(f"`{found.code}`", str(found.exit_code), _about(found)) for found in classes
              if issubclass(found, StartupError) and found is not StartupError]
    return "\n".join([note("epdd.errors"), HEAD, "## In answers\n", table(("code", "status", "when"), rows), STARTUP,
                      table(("code", "exit code", "when"), starts)])


def _about(found: type[EpddError]) -> str:
    return " ".join(inspect.cleandoc(found.__doc__ or "").split("\n\n")[0].split())


def _is_base(found: type[EpddError]) -> bool:
    """Whether the class only groups others."""
    return found in (errors.RequestError, errors.CapacityError, errors.WorkerError)


def _raised(classes: dict[str, type[EpddError]]) -> Iterator[tuple[str, int, str]]:
    """(code, status, messages) of every `SomeError("message", code="code")` in the daemon."""
    found: dict[str, tuple[int, dict[str, None]]] = {}
    for path in sorted(Path(epdd.__file__).parent.rglob("*.py")):
        if "worker" in path.parts:      # refuses images as the daemon does, with other messages
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
                code = next((keyword.value for keyword in node.keywords if keyword.arg == "code"), None)
                if isinstance(code, ast.Constant):
                    status = _status(str(code.value), classes[node.func.id])
                    found.setdefault(str(code.value), (status, {}))[1][_message(node.args)] = None
    for code, (status, messages) in found.items():
        yield code, status, " ".join(text for text in messages if text != "...") or ABOUT[code]


def _status(code: str, kind: type[EpddError]) -> int:
    return 405 if code == "method_not_allowed" else kind.status      # from aiohttp, by frontend/http/error_responses.py


def _message(args: list[ast.expr]) -> str:
    """A sentence, with "..." for computed parts."""
    parts = args[0].values if isinstance(args[0], ast.JoinedStr) else args[:1]
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts)
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
