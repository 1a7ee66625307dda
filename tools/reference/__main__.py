"""Writes docs/reference/ and etc/epdd.toml from the code.

    python -m tools.reference           # write the files
    python -m tools.reference --check   # exit code 1 if a file is not current

Settings come from epdd/settings, HTTP from /openapi.json, command lines from argparse, metrics from /metrics, error
codes from epdd.errors and the places that raise them, request fields from epdd.frontend.requests.fields.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from unittest import mock

from tools.reference import settings
from tools.reference.errors import error_codes
from tools.reference.http import http
from tools.reference.metrics import metric_list
from tools.reference.text import note, table

from epdd.cli import main as epdd_main
from epdd.ctl import main as epdctl_main
from epdd.frontend.requests import fields
from epdd.frontend.requests.schema import ChatBody, CompletionBody

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; name the files that are not current")
    args = parser.parse_args()
    stale = {path: text for path, text in files().items() if not is_current(path, text)}
    for path, text in stale.items():
        if args.check:
            print(f"{path.relative_to(ROOT)} is not current: run make reference", file=sys.stderr)
        else:
            path.write_text(text)
            print(f"{path.relative_to(ROOT)} written")
    return 1 if args.check and stale else 0


def pages() -> dict[str, str]:
    """File name -> page."""
    made = {"settings.md": settings.page(), "http.md": http(), "epdd.md": epdd(), "epdctl.md": epdctl(),
            "metrics.md": metric_list(), "errors.md": error_codes(),
            "fields.md": fields.page(ChatBody.__struct_fields__, CompletionBody.__struct_fields__)}
    return {name: f"{text.strip()}\n" for name, text in made.items()}


def files() -> dict[Path, str]:
    """File -> content, of all files."""
    return {FOLDER / name: text for name, text in pages().items()} | {ROOT / "etc" / "epdd.toml": settings.file()}


def is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


# --- command lines

EPDD = """\
# epdd

`epdd serve` starts the daemon. `epdd check`, `epdd pull` and `epdd plan` do one thing and exit.

| exit code | |
|---|---|
| 0 | success |
| 2 | wrong usage |
| 75 | temporary failure: the network, the Hub or the port is not available; a retry may help |
| 78 | a setting, the model or the machine does not fit; a retry without a change fails again |
| 130 | ended by Ctrl-C |
"""

EPDCTL = """\
# epdctl

`epdctl` shows and controls a running daemon over a Unix socket. `--socket PATH` before the verb chooses one of
several daemons.

| exit code | |
|---|---|
| 0 | success; with `status`: ready |
| 1 | refused or failed; with `status`: not ready |
| 2 | wrong usage |
| 3 | no daemon runs |
| 78 | with `plan`: the daemon would not start |
"""


def epdd() -> str:
    parts = [note("argparse"), EPDD]
    for verb in epdd_main.VERBS:
        parts.append(_command(f"epdd {verb}", _parser(epdd_main.main, verb)))
    return "\n".join(parts)


def epdctl() -> str:
    verbs = next(action for action in _actions(_parser(epdctl_main.main))
                 if isinstance(action, argparse._SubParsersAction))
    texts = {action.dest: action.help or "" for action in verbs._get_subactions()}
    parts = [note("argparse"), EPDCTL]
    for verb, parser in verbs.choices.items():
        parts.append(_command(f"epdctl {verb}", parser, texts[verb]))
    return "\n".join(parts)


def _parser(run: Callable[[Sequence[str]], int], *verb: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    found: list[argparse.ArgumentParser] = []
    with mock.patch.object(argparse.ArgumentParser, "print_help", lambda self, file=None: found.append(self)):
        with suppress(SystemExit):
            run([*verb, "--help"])
    return found[0]


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if not isinstance(action, argparse._HelpAction))


def _command(name: str, parser: argparse.ArgumentParser, text: str = "") -> str:
    """A section, made from the parser: the format of its help changes with Python's version."""
    about = (parser.description or text).strip().rstrip(".")
    rows = []
    for action in _actions(parser):
        if action.option_strings:
            value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 else ""
            cell = ", ".join(f"`{option}{value}`" for option in action.option_strings)
        else:
            cell = f"`{action.metavar}`"
        rows.append((cell, action.help or ""))
    return f"## {name}\n\n{about[:1].upper()}{about[1:]}.\n\n{table(('argument', ''), rows) if rows else ''}"


if __name__ == "__main__":
    sys.exit(main())
