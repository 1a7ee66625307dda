"""Settings: `etc/epdd.toml` and docs/reference/settings.md, from the structs that check them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from msgspec import Struct, inspect, structs

from tools.reference.text import escaped, note, table

from epdd.placement.text import size_text
from epdd.settings.config import SECTIONS
from epdd.settings.values import bare
from epdd.settings.worker_overrides import WorkerOverride

RELOAD = """\
Sizes are in bytes, times in seconds. A reload (`epdctl reload`, `systemctl reload epdd` or SIGHUP) applies [router],
log.level, server.share_caches and the API keys, and opens the request log again. All other settings need a restart.
"""

FILE = """\
# Settings of epdd, each at its default. Remove the "#" in front of a setting to change it.
#
# epdd reads this file from /etc/epdd/epdd.toml or --config FILE. The environment overrides it (EPDD_SERVER_PORT=80),
# and the command line overrides both (--set server.port=80). `epdctl plan` shows which workers would run where.
#
# Made by tools/reference from epdd/settings: `make reference`.
#
"""

WORKERS = """\
# Workers one by one, if encoder.workers and pd.workers cannot say it. The tables of a role are all its workers; the
# other role gets the CPUs and GPUs that they leave. `epdctl plan --why` shows the outcome.
#
# [[worker]]
"""

PAGE = """\
# Settings

A setting comes from these places. A later one wins:

1. the settings file: `--config FILE`, or `/etc/epdd/epdd.toml`. `etc/epdd.toml` in the source has every setting
2. the environment: `EPDD_SERVER_PORT=9000` sets `server.port`
3. the command line: `--set server.port=9000`

Each entry begins with the default.
"""

WORKER_PAGE = """\
## worker

Workers one by one, each as a `[[worker]]` table of the settings file: see [Choose where workers
run](../howto/placement.md).
"""


def file() -> str:
    """etc/epdd.toml."""
    parts = [FILE, textwrap.indent(RELOAD, "# ")]
    for section, kind in SECTIONS.items():
        parts.append(f"\n[{section}]\n")
        for name, default, about, allowed, size in _settings(kind):
            about += f" {allowed[:1].upper()}{allowed[1:]}." * bool(allowed) + f" Default: {size}." * bool(size)
            text = textwrap.wrap(about, 118, break_long_words=False, break_on_hyphens=False)
            parts.append("".join(f"# {line}\n" for line in text) + f"#{name} = {default}\n")
    parts.append(f"\n{WORKERS}")
    for field in structs.fields(WorkerOverride):
        about = bare(field.type)[1]
        example = f"{field.name} = {json.dumps(about['examples'][0])}"
        parts.append(f"# {example:<27} ({about['description']})\n")
    return "".join(parts)


def page() -> str:
    """docs/reference/settings.md."""
    parts = [note("epdd/settings"), PAGE, RELOAD]
    for section, kind in SECTIONS.items():
        parts.append(f"## {section}\n")
        for name, default, about, allowed, size in _settings(kind, "`"):
            parts.append(f"### {section}.{name}\n\nDefault `{default}`{size and f' ({size})'}"
                         f"{allowed and f', {allowed}'}.\n\n{escaped(about)}\n")
    rows = [(f"`{field.name}`", escaped(bare(field.type)[1]["description"]))
            for field in structs.fields(WorkerOverride)]
    return "\n".join([*parts, WORKER_PAGE, table(("setting", ""), rows)])


def _settings(kind: type[Struct], quote: str = "") -> Iterator[tuple[str, str, str, str, str]]:
    """Name, default, description, what is allowed, and the default as a size: of each setting of a section."""
    for field in structs.fields(kind):
        type_, about = bare(field.type)
        show = about.get("show", json.dumps)
        allowed = ""
        match type_:
            case inspect.LiteralType(values=values):
                allowed = f"one of {', '.join(f'{quote}{json.dumps(value)}{quote}' for value in values)}"
            case inspect.IntType(ge=least, le=most) if least or most:
                allowed = f"at most {show(most)}" if most else f"at least {least}"
        size = size_text(field.default) if field.name.endswith("bytes") and field.default > 0 else ""
        yield field.name, show(field.default), " ".join(about["description"].split()), allowed, size
