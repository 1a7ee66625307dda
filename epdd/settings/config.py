"""All settings: structs filled from a TOML file, the environment and arguments, in that order.

`service.py` and `workers.py` describe each setting once: `etc/epdd.toml` and docs/reference are made from that.  A
setting `key` of section `name` is `EPDD_NAME_KEY` in the environment and `--set name.key=value` on the command line.
"""

from __future__ import annotations

import argparse
import os
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from epdd.errors import ConfigError
from epdd.settings.arguments import Parser, near
from epdd.settings.paths import SYSTEM_FILE, runtime_dir
from epdd.settings.renamed import Names
from epdd.settings.service import AdminSettings, LogSettings, MediaSettings, ServerSettings
from epdd.settings.values import checked
from epdd.settings.worker_overrides import ROLES, WorkerOverride, count, override
from epdd.settings.workers import (ArenaSettings, EmulationSettings, EncoderSettings, FleetSettings, ModelSettings,
                                   PrefillDecodeSettings, RouterSettings)


class Config(Struct, frozen=True):
    """Everything an operator can set; each field is one TOML table, `worker` any number of them."""

    server: ServerSettings = ServerSettings()
    admin: AdminSettings = AdminSettings()
    model: ModelSettings = ModelSettings()
    encoder: EncoderSettings = EncoderSettings()
    pd: PrefillDecodeSettings = PrefillDecodeSettings()
    arena: ArenaSettings = ArenaSettings()
    router: RouterSettings = RouterSettings()
    media: MediaSettings = MediaSettings()
    fleet: FleetSettings = FleetSettings()
    emulation: EmulationSettings = EmulationSettings()
    log: LogSettings = LogSettings()
    worker: tuple[WorkerOverride, ...] = ()           # all workers of their roles, one by one; empty: as placement says

    def with_values(self, section: str, values: Mapping[str, Any], source: str) -> "Config":
        """A copy with `values` set in `section`.  Raises ConfigError naming `source` and the field."""
        if section not in SECTIONS:
            raise ConfigError(f"{source}: unknown section [{section}]{near(section, SECTIONS)}")
        new = checked(SECTIONS[section], values, source, f"{section}.")
        return replace(self, **{section: replace(getattr(self, section), **new)})


SECTIONS: dict[str, type[Struct]] = {name: kind for name, kind in typing.get_type_hints(Config).items()
                                     if name != "worker"}


def load(argv: Sequence[str], environ: Mapping[str, str] | None = None,
         prog: str = "python -m epdd") -> tuple[Config, argparse.Namespace]:
    """Settings from file, environment and arguments; a later source overrides an earlier one.  Raises ConfigError.

    `warnings` of the returned arguments are log lines about settings that were given by an old name.
    """
    args = _parser(prog).parse_args(argv)
    if args.positional and args.model:
        raise ConfigError(f"two models: {args.positional} and --model {args.model}; name one")
    args.model = args.positional or args.model
    environ = os.environ if environ is None else environ
    config, names = Config(), Names()
    path = Path(args.config) if args.config else SYSTEM_FILE
    if args.config or path.is_file():
        config = from_file(config, path, names)
    config = _from_environ(config, environ, names)
    for option, section, key in (("model", "model", "path"), ("revision", "model", "revision"),
                                 ("host", "server", "host"), ("port", "server", "port"),
                                 ("emulate", "emulation", "profile")):
        value = getattr(args, option)
        if value is not None:
            config = config.with_values(section, {key: value}, f"--{option}")
    for item in args.set:
        name, _, value = item.partition("=")
        section, _, key = name.partition(".")
        config = config.with_values(section, names.current(section, {key: value}, "--set"), "--set")
    _check_together(config)
    args.warnings = names.warnings
    return config, args


def from_file(config: Config, path: Path, names: Names | None = None) -> Config:
    """`config` with the settings of a TOML file.  Raises ConfigError naming file, section and setting."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    names = names or Names()
    worker = tables.pop("worker", [])
    if not isinstance(worker, list):
        raise ConfigError(f"{path}: worker must be [[worker]] tables")
    config = replace(config, worker=tuple(override(table, f"{path}: [[worker]] {i}") for i, table in enumerate(worker)))
    for section, values in tables.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section} must be a table")
        config = config.with_values(section, names.current(section, values, str(path)), str(path))
    return config


def _check_together(config: Config) -> None:
    """Raises ConfigError on settings that contradict each other."""
    for role in ROLES:
        asked = getattr(config, role).workers
        if count(asked).total and any(worker.role == role for worker in config.worker):
            raise ConfigError(f"{role}.workers is {asked!r}, and [[worker]] tables list the {role} workers: choose one")


def admin_socket(config: Config, port: int) -> Path:
    """Path of the admin socket: admin.socket, or one named by the port, so that several daemons can run."""
    if config.admin.socket:
        return Path(config.admin.socket)
    return runtime_dir() / f"admin-{port}.sock"


def _from_environ(config: Config, environ: Mapping[str, str], names: Names) -> Config:
    for section in SECTIONS:
        prefix = f"EPDD_{section.upper()}_"
        values = {name[len(prefix):].lower(): value for name, value in environ.items()
                  if name.startswith(prefix)}
        if values:
            config = config.with_values(section, names.current(section, values, "environment"), "environment")
    return config


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Start the daemon, which serves a vision-language model from this machine "
                    "by an OpenAI-compatible API. --set takes every setting of etc/epdd.toml.")
    parser.add_argument("positional", nargs="?", metavar="MODEL",
                        help="folder of a checkpoint, or a model of the Hub as ORG/NAME (default: a small demo model)")
    parser.add_argument("--model", metavar="MODEL", help="the same as the argument MODEL")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a model of the Hub (default: main)")
    parser.add_argument("--emulate", metavar="NAME", help="emulate devices: name of a shipped profile, or a file")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", help="TCP port to listen on (default: 8765); 0: any free one")
    parser.add_argument("--config", metavar="FILE", help=f"settings file (default: {SYSTEM_FILE} if it exists)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="set one setting, as in --set server.port=9000; may be repeated")
    parser.add_argument("--plan", action="store_true", help="print which workers would run where, and exit")
    parser.add_argument("--version", action="store_true", help="print the version, and exit")
    return parser
