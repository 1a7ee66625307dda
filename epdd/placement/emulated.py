"""The workers of an emulated fleet: its profile lists them; they are bound to no CPU or GPU of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TypeVar

from epdd import arena
from epdd.emulated_time import EncoderGroup, PrefillDecodeGroup
from epdd.emulation import Emulation
from epdd.errors import PlacementError
from epdd.families import ModelInfo
from epdd.settings.config import Config
from epdd.settings.worker_overrides import WorkerCount, Workers, count as asked_count
from epdd.wire import WorkerSpec

G = TypeVar("G", EncoderGroup, PrefillDecodeGroup)


def decide(emulation: Emulation, config: Config, family: ModelInfo,
           arena_bytes: int) -> tuple[list[WorkerSpec], list[str]]:
    """Specs, encoders first, both in the profile's order, and why.

    `encoder.workers` and `pd.workers` leave workers out ("gpu:1" leaves the CPUs out).  Raises PlacementError if they
    ask for more than the profile has, or if there are [[worker]] tables, which place real workers.
    """
    profile = emulation.profile
    if config.worker:
        raise PlacementError("[[worker]] tables place real workers; the emulated fleet is the profile's "
                             "(encoder.workers and pd.workers leave workers out)")
    gpus = count()
    encoders = _chosen(profile.encoder, config.encoder.workers, "encoder")
    slices = arena.slices(arena_bytes, len(encoders))
    specs = []
    for i, group in enumerate(encoders):
        specs.append(_spec(emulation, config, family, arena_bytes, group, f"encoder/{i}", gpus, arena_slice=slices[i]))
    for i, pd in enumerate(_chosen(profile.pd, config.pd.workers, "pd")):
        specs.append(_spec(emulation, config, family, arena_bytes, pd, f"pd/{i}", gpus,
                           kv_tokens=config.pd.kv_tokens or pd.kv_tokens,
                           max_model_len=min(config.model.max_model_len or pd.context_max, pd.context_max)))
    return specs, [f"the fleet is emulated: profile {profile.name}, {profile.about}",
                   "emulated workers are bound to nothing; their devices are labels"]


def _chosen(groups: Sequence[G], workers: Workers, role: str) -> list[G]:
    """One group for each worker to start.  Raises PlacementError."""
    everyone = [group for group in groups for _ in range(group.count)]
    asked: WorkerCount = asked_count(workers)
    if not asked.total:
        return everyone
    left = dict(zip(("gpu", "cpu"), asked.split)) if asked.split else {"": asked.total}
    chosen = []
    for group in everyone:
        key = group.kind if asked.split else ""
        if left[key]:
            left[key] -= 1
            chosen.append(group)
    if any(left.values()):
        there = [f"{kind}:{sum(group.kind == kind for group in everyone)}" for kind in ("gpu", "cpu")]
        raise PlacementError(f"{role}.workers is {workers!r}; the profile has {','.join(there)}")
    return chosen


def _spec(emulation: Emulation, config: Config, family: ModelInfo, arena_bytes: int,
          group: EncoderGroup | PrefillDecodeGroup, name: str, gpus: Iterator[int], **options: object) -> WorkerSpec:
    fields: dict[str, object] = dict(
        name=name, role=name.partition("/")[0], device="cpu" if group.kind == "cpu" else f"cuda:{next(gpus)}",
        cpus=(), numa_node=None, threads=1, model=family.folder, dtype=config.model.dtype, arena_bytes=arena_bytes,
        huge_pages=config.arena.huge_pages, max_batched_tokens=config.pd.max_batched_tokens,
        max_sequences=config.pd.max_sequences, log_level=config.log.level, emulated=emulation.worker(group))
    return WorkerSpec(**{**fields, **options})  # type: ignore[arg-type]
