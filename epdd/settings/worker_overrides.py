"""What an operator can ask of placement: a number of workers for a role, or each worker in a [[worker]] table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, get_args

from msgspec import Meta, Struct

from epdd.errors import ConfigError
from epdd.settings.values import Count, checked

Role = Literal["encoder", "pd"]
ROLES: tuple[str, ...] = get_args(Role)
CPU_MAX = 1 << 16           # above any CPU number Linux gives; keeps "0-4294967295" from filling memory

Workers = NewType("Workers", str)       # "auto", a number, or "gpu:1,cpu:4"
WORKERS = Meta(pattern=r"^(auto|\d+|(?=.*[1-9])(gpu: *\d+( *, *cpu: *\d+)?|cpu: *\d+( *, *gpu: *\d+)?))$",
               extra={"expected": '"auto", a number, or like "gpu:1,cpu:4"'})


@dataclass(frozen=True)
class WorkerCount:
    """How many workers of a role."""

    total: int = 0                              # 0: placement decides
    split: tuple[int, int] | None = None        # on GPUs and on CPUs; None: placement decides


class WorkerOverride(Struct, frozen=True):
    """One worker as a [[worker]] table describes it.  `examples` of a field are those of etc/epdd.toml."""

    role: Annotated[Role, Meta(description='"encoder" or "pd"', examples=["encoder"])]
    device: Annotated[str, Meta(
        pattern=r"^(cpu|gpu:\d+)$", extra={"expected": '"cpu" or like "gpu:0"'}, examples=["gpu:1"],
        description='"cpu", the default, or a GPU as `epdctl topology` numbers them')] = "cpu"
    cpus: Annotated[tuple[int, ...], Meta(
        examples=["0-15,32"], description="logical CPUs, which no other worker gets; default: placement chooses")] = ()
    numa_node: Annotated[Count | None, Meta(
        examples=[0], description="NUMA node whose memory and cores it uses; default: placement chooses")] = None
    threads: Annotated[Count, Meta(
        examples=[8], description="threads that compute, at most one a core; default: one on each of its cores")] = 0

    @property
    def gpu(self) -> int | None:
        return None if self.device == "cpu" else int(self.device.removeprefix("gpu:"))


def count(workers: Workers) -> WorkerCount:
    if workers == "auto" or workers.isdecimal():
        return WorkerCount(0 if workers == "auto" else int(workers))
    parts = [part.partition(":") for part in workers.split(",")]
    kinds = {kind.strip(): int(number) for kind, _, number in parts}
    return WorkerCount(sum(kinds.values()), (kinds.get("gpu", 0), kinds.get("cpu", 0)))


def override(table: Any, where: str) -> WorkerOverride:
    """One [[worker]] table.  Raises ConfigError naming `where` and the field."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table")
    cpus = {"cpus": _cpus(table["cpus"], where)} if "cpus" in table else {}
    return WorkerOverride(**checked(WorkerOverride, {"role": None} | table | cpus, where))


def _cpus(value: Any, where: str) -> list[int]:
    """Sorted CPU numbers of text like "0-3,8", or of a list of numbers."""
    text = ",".join(map(str, value)) if isinstance(value, list) else value
    parts = text.replace(" ", "").split(",") if isinstance(text, str) else ["?"]
    found: set[int] = set()
    for part in filter(None, parts):
        bounds = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if not first <= last < CPU_MAX:
            raise ConfigError(f'{where}: cpus is {value!r}; expected: like "0-3,8"')
        found.update(range(first, last + 1))
    return sorted(found)
