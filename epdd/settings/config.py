"""All settings: frozen dataclasses filled from a TOML file, the environment and arguments, in that order.

`etc/epdd.toml` lists every setting at its default with the reason; a test holds it equal to `Config()`.
A setting `key` of section `name` is `EPDD_NAME_KEY` in the environment and `--set name.key=value` on the
command line.  The file is long because the settings are many; what reads them is short.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from epdd.errors import ConfigError
from epdd.settings.arguments import Parser, near
from epdd.settings.renamed import Names
from epdd.settings.worker_overrides import ROLES, WorkerOverride, Workers, count, wish

SYSTEM_FILE = Path("/etc/epdd/epdd.toml")


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8765                        # 0: any free port, shown in `epdctl status`
    unix_socket: str = ""                   # another listener; empty: none
    unix_socket_mode: int = 0o600
    unix_socket_group: str = ""             # give the socket to this group and allow it
    api_keys: tuple[str, ...] = field(default=(), repr=False)   # without any, no key is needed
    api_keys_file: str = ""                 # more keys, one a line
    share_caches: bool = False              # also between API keys
    cors_origins: tuple[str, ...] = ()      # whose pages may use the API in a browser; "*": all
    max_requests: int = 256                 # in flight; more get 429
    max_body_bytes: int = 128 << 20         # eight phone photos in base64 are about 60 MB
    max_connections: int = 4096             # at once; 0: as many as descriptors allow
    head_timeout_s: float = 10.0            # from a connection, or a request's first byte, to its whole head
    body_timeout_s: float = 10.0            # in which a body must move on, by at least 512 bytes a second
    keep_alive_s: float = 75.0              # a connection may stay so long without a request
    timeout_s: float = 600.0                # from the request's arrival to its last token
    strict: bool = False                    # refuse requests with fields nobody knows
    shutdown_timeout_s: float = 30.0        # at stop: time for running requests to end


@dataclass(frozen=True)
class AdminSettings:
    socket: str = ""                        # empty: epdd's runtime folder
    mode: int = 0o600
    group: str = ""                         # give the socket to this group and allow it


@dataclass(frozen=True)
class ModelSettings:
    path: str = ""                          # folder, or a Hub's id (ORG/NAME); empty: the demo model of epdd
    revision: str = ""                      # of an id: branch, tag or commit; empty: main
    download: bool = False                  # fetch a model named by id that is not in the local cache
    name: str = ""                          # name in the API; empty: the id, or the folder's name
    aliases: tuple[str, ...] = ()           # other names that requests may use
    dtype: str = "auto"
    max_model_len: int = 0                  # tokens; 0: what the checkpoint allows
    reasoning: str = "auto"                 # a thinking model's reasoning apart from its answer; off: all is answer


@dataclass(frozen=True)
class EncoderSettings:
    workers: Workers = Workers("auto")      # a number, or "gpu:1,cpu:4"; auto: one per NUMA node with CPUs and memory
    threads: int = 0                        # 0: the cores it is bound to
    quantize: str = ""                      # "int8": products in int8 where faster and near enough
    ahead_s: float = 0.25                   # an encoder gets the next image so long before it is done, to prepare it


@dataclass(frozen=True)
class PrefillDecodeSettings:
    workers: Workers = Workers("auto")      # likewise; auto: one without GPUs, else as placement says
    threads: int = 0
    max_batched_tokens: int = 512           # tokens a step may hold
    step_s: float = 0.1                     # or as many as take so long, where answers wait for them; 0: no limit
    max_sequences: int = 64                 # sequences that decode together
    kv_tokens: int = 0                      # 0: as many as kv_bytes hold
    kv_bytes: int = 0                       # 0: an eighth of memory, at most 8 GiB; on a GPU all that is left
    kv_dtype: str = "auto"                  # of keys and values on CPUs; auto: the weights'
    prefix_cache: bool = True               # keep what was computed, for prompts that begin alike


@dataclass(frozen=True)
class ArenaSettings:
    bytes: int = 0                          # 0: the least of 4 GiB, a quarter of memory, 1,024 of the largest images
    gpu_bytes: int = -1                     # on each encoding GPU; -1: a 32nd of it, at most 4 GiB; 0: none
    cache_bytes: int = -1                   # embeddings kept for reuse; -1: the whole arena, 0: none
    huge_pages: bool = True                 # where the system has them


@dataclass(frozen=True)
class RouterSettings:
    policy: str = "earliest"                # budget, earliest, least-loaded, round-robin, gpu-only
    unit: str = "patch"                     # what in-flight work is counted in: request, image, patch
    ratio: float = 0.0                      # R, GPU speed over CPU speed; 0: measured
    slack: float = 1.0                      # 0: first come first served; more: small requests before large ones


@dataclass(frozen=True)
class MediaSettings:
    fetch: str = "public"                   # http(s) images: off, allowlist, public
    allow: tuple[str, ...] = ()             # allowlist: host, host:port or CIDR
    folders: tuple[str, ...] = ()           # file: images, from below these only; none: off
    timeout_s: float = 10.0                 # whole fetch, not each read
    max_redirects: int = 3
    max_file_bytes: int = 32 << 20          # one image file
    max_pixels: int = 64_000_000            # one image, from its header
    max_images: int = 16                    # images in one request
    max_inflight_bytes: int = 512 << 20     # image files held in memory at once
    max_fetches: int = 32                   # at once


@dataclass(frozen=True)
class FleetSettings:
    backoff_s: float = 0.5                  # before the first restart; doubles
    max_backoff_s: float = 30.0
    max_failures: int = 5                   # deaths one after another, until a worker is given up
    min_uptime_s: float = 30.0              # after this time in service a worker's failures count anew
    poison_s: float = 600.0                 # an image or prompt lost with two workers is refused for so long
    start_timeout_s: float = 600.0          # spawn to Ready
    stall_s: float = 15.0                   # silence of a worker that stands still: it hangs


@dataclass(frozen=True)
class EmulationSettings:
    profile: str = ""                       # name of a shipped profile, or a file; empty: real devices
    scale: float = 0.0                      # times as fast as the profile says; 0: the profile's own


@dataclass(frozen=True)
class LogSettings:
    level: str = "info"
    requests: str = ""                      # file of the request log; empty: none
    max_requests_bytes: int = 64 << 20      # then it becomes FILE.1
    requests_kept: int = 4                  # files that are full


@dataclass(frozen=True)
class Config:
    """Everything an operator can set; each field is one TOML table, `worker` any number of them."""

    server: ServerSettings = field(default_factory=ServerSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    pd: PrefillDecodeSettings = field(default_factory=PrefillDecodeSettings)
    arena: ArenaSettings = field(default_factory=ArenaSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    media: MediaSettings = field(default_factory=MediaSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    emulation: EmulationSettings = field(default_factory=EmulationSettings)
    log: LogSettings = field(default_factory=LogSettings)
    worker: tuple[WorkerOverride, ...] = ()           # all workers of their roles, one by one; empty: as placement says

    def with_values(self, section: str, values: Mapping[str, Any], source: str) -> "Config":
        """A copy with `values` set in `section`.  Raises ConfigError naming `source` and the field."""
        if section not in SECTIONS:
            raise ConfigError(f"{source}: unknown section [{section}]{near(section, SECTIONS)}")
        kinds = typing.get_type_hints(SECTIONS[section])
        checked = {}
        for key, value in values.items():
            if key not in kinds:
                raise ConfigError(f"{source}: unknown setting {section}.{key}{near(key, kinds)}")
            checked[key] = _coerce(value, kinds[key], f"{source}: {section}.{key}")
        return replace(self, **{section: replace(getattr(self, section), **checked)})


SECTIONS: dict[str, type] = {f.name: typing.get_type_hints(Config)[f.name] for f in fields(Config)
                             if f.name != "worker"}

POLICIES = {                                # router.policy, in the words of `epdctl policy`
    "budget": "CPU encoders while they have less in flight than their share of the GPUs' work",
    "earliest": "the encoder that finishes the image first, counting the images ahead of it",
    "least-loaded": "the encoder with the least in flight; for comparison",
    "round-robin": "each encoder in turn; for comparison",
    "gpu-only": "GPU encoders alone, all where there is no GPU; for comparison",
}

CHOICES = {                               # what a setting that is a word may be
    "model.dtype": ("auto", "float32", "bfloat16", "float16"),
    "model.reasoning": ("auto", "off"),
    "encoder.quantize": ("", "int8"),
    "pd.kv_dtype": ("auto", "float32", "bfloat16"),
    "router.policy": tuple(POLICIES),
    "router.unit": ("request", "image", "patch"),
    "media.fetch": ("off", "allowlist", "public"),
    "log.level": ("debug", "info", "warning", "error"),
}

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")      # as browsers send it: no path, no slash at the end


def load(argv: Sequence[str], environ: Mapping[str, str] | None = None,
         prog: str = "python -m epdd") -> tuple[Config, argparse.Namespace]:
    """Settings from file, environment and arguments, the later winning.  Raises ConfigError.

    `warnings` of the arguments are lines for the log: settings by former names.
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
    validate(config)
    args.warnings = names.warnings
    return config, args


def from_file(config: Config, path: Path, names: Names | None = None) -> Config:
    """`config` with the settings of a TOML file.  Raises ConfigError."""
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
    config = replace(config, worker=tuple(wish(table, f"{path}: [[worker]] {i}") for i, table in enumerate(worker)))
    for section, values in tables.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section} must be a table")
        config = config.with_values(section, names.current(section, values, str(path)), str(path))
    return config


def validate(config: Config) -> None:
    """Raises ConfigError on values that cannot work."""
    for name, allowed in CHOICES.items():
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
    for role in ROLES:
        asked = getattr(config, role).workers
        if count(asked, f"{role}.workers").total and any(wish.role == role for wish in config.worker):
            raise ConfigError(f"{role}.workers is {asked!r}, and [[worker]] tables list the {role} workers: choose one")
    signed = {"arena.cache_bytes", "arena.gpu_bytes"}
    for section in SECTIONS:
        for f in fields(SECTIONS[section]):
            value = getattr(getattr(config, section), f.name)
            if isinstance(value, (int, float)) and value < 0 and f"{section}.{f.name}" not in signed:
                raise ConfigError(f"{section}.{f.name} is {value}; it must not be negative")
    if config.server.port > 65535:
        raise ConfigError(f"server.port is {config.server.port}; at most 65535")
    for origin in config.server.cors_origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"server.cors_origins has {origin!r}; expected: \"*\" or like \"https://example.com\"")
    for name in ("server.max_requests", "pd.max_batched_tokens", "pd.max_sequences", "media.max_pixels",
                 "media.max_fetches"):
        section, key = name.split(".")
        if getattr(getattr(config, section), key) < 1:
            raise ConfigError(f"{name} must be at least 1")


def runtime_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of the admin sockets: systemd's RuntimeDirectory, else the user's, else a private one in /tmp."""
    environ = os.environ if environ is None else environ
    if environ.get("RUNTIME_DIRECTORY"):
        return Path(environ["RUNTIME_DIRECTORY"].split(":")[0])
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "epdd"
    return Path(f"/tmp/epdd-{os.getuid()}")


def admin_socket(config: Config, port: int) -> Path:
    """The admin socket: as configured, else one per port, so that several daemons can run side by side."""
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


def _coerce(value: Any, kind: Any, where: str) -> Any:
    """`value` (from TOML, or text from environment and arguments) as `kind`."""
    try:
        if kind is bool:
            words = {"true": True, "false": False}
            if str(value).lower() in words:     # TOML's own values too
                return words[str(value).lower()]
        elif kind is int:
            if isinstance(value, str):
                return int(value, 0)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        elif kind is float:
            if isinstance(value, (int, float, str)) and not isinstance(value, bool) and isfinite(float(value)):
                return float(value)
        elif kind is Workers:
            if isinstance(value, (int, str)) and not isinstance(value, bool):
                return Workers(str(value).strip())
        elif kind is str:
            if isinstance(value, str):
                return value
        else:  # tuple[str, ...]
            items = value.split(",") if isinstance(value, str) else value
            if isinstance(items, list) and all(isinstance(item, str) for item in items):
                return tuple(item.strip() for item in items if item.strip())
    except ValueError:
        pass
    shown = "..." if where.endswith("api_keys") else repr(value)
    raise ConfigError(f"{where} is {shown}; {_KINDS.get(kind, 'a list of texts')} expected")


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Workers: "a number or text"}


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Serve a vision-language model from this machine.")
    parser.add_argument("positional", nargs="?", metavar="MODEL",
                        help="checkpoint folder, or a model of the Hub as ORG/NAME (default: the demo model)")
    parser.add_argument("--model", metavar="MODEL", help="another way to name MODEL")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a model of the Hub (default: main)")
    parser.add_argument("--emulate", metavar="NAME", help="devices with given time models: a shipped profile or a file")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", help="TCP port to listen on; 0: any")
    parser.add_argument("--config", metavar="FILE", help=f"settings (default: {SYSTEM_FILE} if it is there)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one setting")
    parser.add_argument("--plan", action="store_true", help="print which workers would run where, and stop")
    parser.add_argument("--version", action="store_true", help="print the version, and stop")
    return parser
