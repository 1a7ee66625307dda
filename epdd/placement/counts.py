"""How many workers of each role, and how many of them on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from epdd.errors import PlacementError
from epdd.hardware.topology import Gpu, Topology, plural
from epdd.placement.assignment import Placement
from epdd.settings.config import Config
from epdd.settings.worker_overrides import ROLES, count


def decide(topology: Topology, config: Config, domains: int,
           asked: Sequence[Placement]) -> tuple[list[Placement], list[str]]:
    """Workers of the roles that have no [[worker]] tables, and the reasons.  Raises PlacementError."""
    taken = {worker.gpu.index for worker in asked if worker.gpu}
    gpus = [gpu for gpu in topology.gpus if gpu.index not in taken]
    listed = {role for role in ROLES if any(worker.role == role for worker in asked)}
    encoder_gpus, encoder_cpus, pd_gpus, pd_cpus = _split(config, gpus, domains, listed)
    shared = max(0, encoder_gpus + pd_gpus - len(gpus))
    if shared and (not _may_share(config, listed) or max(encoder_gpus, pd_gpus) > len(gpus)):
        raise PlacementError(f"encoder.workers is {config.encoder.workers}, pd.workers is {config.pd.workers}: that "
                             f"takes {plural(encoder_gpus + pd_gpus, 'GPU')}; {_there(gpus, topology)}")
    made = [Placement("encoder", gpu=gpu) for gpu in gpus[:encoder_gpus]]
    made += [Placement("pd", gpu=gpu) for gpu in gpus[encoder_gpus - shared:][:pd_gpus]]
    made += [Placement("encoder", threads=config.encoder.threads) for _ in range(encoder_cpus)]
    made += [Placement("pd", threads=config.pd.threads) for _ in range(pd_cpus)]
    why = [f"{role}: {plural(sum(worker.role == role for worker in asked), 'worker')} as the [[worker]] tables say"
           for role in ROLES if role in listed]
    for role, on_gpus, on_cpus in (("encoder", encoder_gpus, encoder_cpus), ("pd", pd_gpus, pd_cpus)):
        if role not in listed:
            workers = getattr(config, role).workers
            reason = _automatic(role, on_gpus, on_cpus) if count(workers).total == 0 else f"asked: {workers}"
            why.append(f"{role}: {on_gpus} on GPUs, {on_cpus} on CPUs: {reason}")
    return made, why


def _split(config: Config, gpus: Sequence[Gpu], domains: int, listed: set[str]) -> tuple[int, int, int, int]:
    """Encoders on GPUs and CPUs, prefill-decode workers on GPUs and CPUs."""
    encoders, pds = count(config.encoder.workers), count(config.pd.workers)
    encoder_gpus, encoder_cpus = encoders.split or (0, 0)
    if "pd" in listed:
        pd_gpus, pd_cpus = 0, 0
    elif pds.split:
        pd_gpus, pd_cpus = pds.split
    elif pds.total:
        pd_gpus, pd_cpus = (pds.total, 0) if gpus else (0, pds.total)
    else:
        # One GPU encoder feeds several prefill-decode workers: decoding keeps a GPU busy far longer than encoding.
        spared = encoder_gpus if encoders.split else 0 if "encoder" in listed else int(len(gpus) > 1)
        pd_gpus = max(0, len(gpus) - spared)
        pd_cpus = 0 if pd_gpus else 1
    if "encoder" in listed:
        return 0, 0, pd_gpus, pd_cpus
    if not encoders.split:
        encoder_gpus = max(0, len(gpus) - pd_gpus)
        encoder_cpus = domains
        if encoders.total:
            encoder_gpus = min(encoder_gpus, encoders.total)
            encoder_cpus = encoders.total - encoder_gpus
    return encoder_gpus, encoder_cpus, pd_gpus, pd_cpus


def _may_share(config: Config, listed: set[str]) -> bool:
    """The two roles share GPUs only if `encoder.workers` and `pd.workers` both say how many GPUs they take."""
    return not listed and all(count(getattr(config, role).workers).split for role in ROLES)


def _automatic(role: str, on_gpus: int, on_cpus: int) -> str:
    if role == "encoder":
        every = "every NUMA node with CPUs and memory encodes"
        return f"{every}, and one GPU feeds the others" if on_gpus == 1 else (
            f"{every}, and so do the GPUs that are left" if on_gpus else every)
    return "GPUs decode far faster than CPUs" if on_gpus else "one is enough to batch all requests"


def _there(gpus: Sequence[Gpu], topology: Topology) -> str:
    taken = len(topology.gpus) - len(gpus)
    there = f"there {'is' if len(topology.gpus) == 1 else 'are'} {plural(len(topology.gpus), 'GPU')}"
    return f"{there}, {taken} of them in [[worker]] tables" if taken else there
