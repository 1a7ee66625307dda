"""What an operator can ask of placement: how many workers of a role, or each one in a [[worker]] table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NewType

from epdd.errors import ConfigError

ROLES = ("encoder", "pd")
CPU_MAX = 1 << 16           # above any CPU number Linux gives; keeps "0-4294967295" from filling memory

Workers = NewType("Workers", str)       # "auto", a number, or "gpu:1,cpu:4"


@dataclass(frozen=True)
class WorkerCount:
    """How many workers of a role."""

    total: int = 0                              # 0: placement decides
    split: tuple[int, int] | None = None        # on GPUs and on CPUs; None: placement decides


@dataclass(frozen=True)
class WorkerOverride:
    """One worker as a [[worker]] table describes it."""

    role: str
    device: str = "cpu"                         # or "gpu:N"
    cpus: tuple[int, ...] = ()                  # empty: placement decides
    numa_node: int | None = None
    threads: int = 0                            # 0: one on each of its cores

    @property
    def gpu(self) -> int | None:
        return None if self.device == "cpu" else int(self.device.removeprefix("gpu:"))


def count(workers: Workers, where: str) -> WorkerCount:
    """Raises ConfigError naming `where`."""
    text = workers.replace(" ", "")
    if text in ("auto", "0"):
        return WorkerCount()
    if text.isdecimal():
        return WorkerCount(total=int(text))
    parts = [part.partition(":") for part in text.split(",")]
    kinds = {kind: int(number) for kind, _, number in parts if number.isdecimal()}
    if len(kinds) < len(parts) or not kinds.keys() <= {"gpu", "cpu"} or not sum(kinds.values()):
        raise ConfigError(f'{where} is {workers!r}; expected: "auto", a number, or like "gpu:1,cpu:4"')
    return WorkerCount(total=sum(kinds.values()), split=(kinds.get("gpu", 0), kinds.get("cpu", 0)))


def wish(table: Any, where: str) -> WorkerOverride:
    """One [[worker]] table.  Raises ConfigError naming `where` and the field."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table")
    unknown = set(table) - set(WorkerOverride.__dataclass_fields__)
    if unknown:
        raise ConfigError(f"{where}: unknown setting {sorted(unknown)[0]}")
    if table.get("role") not in ROLES:
        raise ConfigError(f"{where}: role is {table.get('role')!r}; allowed: {', '.join(ROLES)}")
    device = table.get("device", "cpu")
    if not isinstance(device, str) or not re.fullmatch(r"cpu|gpu:\d+", device):
        raise ConfigError(f'{where}: device is {device!r}; expected: "cpu" or like "gpu:0"')
    for key in ("numa_node", "threads"):
        value = table.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{where}: {key} is {value!r}; a whole number from 0 expected")
    return WorkerOverride(role=table["role"], device=device, cpus=_cpus(table.get("cpus", ""), where),
                          numa_node=table.get("numa_node"), threads=table.get("threads", 0))


def _cpus(value: Any, where: str) -> tuple[int, ...]:
    """"0-3,8", or the numbers as a list."""
    text = ",".join(map(str, value)) if isinstance(value, list) else value
    parts = text.replace(" ", "").split(",") if isinstance(text, str) else ["?"]
    found: set[int] = set()
    for part in filter(None, parts):
        bounds = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if not first <= last < CPU_MAX:
            raise ConfigError(f'{where}: cpus is {value!r}; expected: like "0-3,8"')
        found.update(range(first, last + 1))
    return tuple(sorted(found))
