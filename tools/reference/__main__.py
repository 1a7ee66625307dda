"""Writes docs/reference/: pages made from the code, so that they cannot disagree with it.

    python -m tools.reference           # write the pages
    python -m tools.reference --check   # exit code 1 if a page is not current

Settings come from etc/epdd.toml, HTTP from /openapi.json, command lines from argparse, metrics from /metrics, error
codes from epdd.errors and the places that raise them, request fields from epdd.frontend.requests.fields.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from unittest import mock

from tools.reference.errors import error_codes
from tools.reference.http import http
from tools.reference.metrics import metric_list
from tools.reference.text import escaped, note, table

from epdd.cli import main as epdd_main
from epdd.ctl import main as epdctl_main
from epdd.frontend.requests import fields
from epdd.frontend.requests.schema import ChatBody, CompletionBody
from epdd.settings import config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; name the pages that are not current")
    args = parser.parse_args()
    stale = {name: text for name, text in pages().items() if not is_current(name, text)}
    for name, text in stale.items():
        if args.check:
            print(f"docs/reference/{name} is not current: run make reference", file=sys.stderr)
        else:
            (FOLDER / name).write_text(text)
            print(f"docs/reference/{name} written")
    return 1 if args.check and stale else 0


def pages() -> dict[str, str]:
    """Every page by its file's name."""
    made = {"settings.md": settings(), "http.md": http(), "epdd.md": epdd(), "epdctl.md": epdctl(),
            "metrics.md": metric_list(), "errors.md": error_codes(),
            "fields.md": fields.page(ChatBody.__struct_fields__, CompletionBody.__struct_fields__)}
    return {name: f"{text.strip()}\n" for name, text in made.items()}


def is_current(name: str, text: str) -> bool:
    return (FOLDER / name).exists() and (FOLDER / name).read_text() == text


# --- settings

SETTINGS = """\
# Settings

A setting comes from these places. A later one wins:

1. the settings file: `--config FILE`, or `/etc/epdd/epdd.toml`. `etc/epdd.toml` in the source has every setting
2. the environment: `EPDD_SERVER_PORT=9000` sets `server.port`
3. the command line: `--set server.port=9000`

Each entry begins with the default. Sizes are in bytes, times in seconds. A reload (`epdctl reload`, `systemctl reload
epdd` or SIGHUP) takes over `[router]`, `log.level`, `server.share_caches` and the API keys, and opens the request log
anew. All other settings need a restart. `[[worker]]` tables, which list workers one by one, are in
[Choose where workers run](../howto/placement.md).
"""


def settings() -> str:
    """etc/epdd.toml as a page: each setting's default, what it may be, and its comment."""
    # The comment at the top is the introduction above; the [[worker]] tables at the end have no defaults.
    body = (ROOT / "etc" / "epdd.toml").read_text().partition("\n\n")[2].partition("\n# Workers one by one")[0]
    parts, about, section = [note("etc/epdd.toml"), SETTINGS], [], ""
    for line in body.splitlines():
        if found := re.fullmatch(r"\[(\w+)\]", line):
            section = found[1]
            parts.append(f"## {section}\n")
        elif found := re.fullmatch(r"#(\w+) = (.*)", line):
            name = f"{section}.{found[1]}"
            allowed = ", ".join(f'`"{value}"`' for value in config.CHOICES.get(name, ()))
            parts.append(f"### {name}\n\nDefault `{found[2]}`{allowed and f', one of {allowed}'}.\n\n"
                         f"{escaped(' '.join(about))}\n")
            about = []
        elif line.startswith("# "):
            about.append(line[2:])
    return "\n".join(parts)


# --- command lines

EPDD = """\
# epdd

`epdd serve` starts the daemon. `epdd check`, `epdd pull` and `epdd plan` start nothing that stays.

| exit code | |
|---|---|
| 0 | success |
| 2 | wrong usage |
| 75 | the network, the Hub or a free port is missing: trying again later may help |
| 78 | a setting, the model or the machine does not fit: trying again without a change does not help |
| 130 | ended by Ctrl-C |
"""

EPDCTL = """\
# epdctl

`epdctl` looks at a running daemon and steers it, by a Unix socket. `--socket PATH` before the verb chooses one of
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
    """The parser whose help a command would print."""
    found: list[argparse.ArgumentParser] = []
    with mock.patch.object(argparse.ArgumentParser, "print_help", lambda self, file=None: found.append(self)):
        with suppress(SystemExit):
            run([*verb, "--help"])
    return found[0]


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if not isinstance(action, argparse._HelpAction))


def _command(name: str, parser: argparse.ArgumentParser, text: str = "") -> str:
    """A section; written from the parser and not from its help, whose form changes with Python's version."""
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
