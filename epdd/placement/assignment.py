"""Gives each worker its domain and its cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from epdd.errors import PlacementError
from epdd.hardware.topology import Gpu, Topology, plural, ranges
from epdd.placement import domains
from epdd.placement.domains import Domain
from epdd.settings.worker_overrides import WorkerOverride

# Cores a GPU worker keeps busy: launching kernels is one thread; an encoder also decodes the next image.
HOST_CORES = {"encoder": 2, "pd": 1}


@dataclass
class Placement:
    """Where one worker runs; `sizes.py` makes its WorkerSpec of it."""

    role: str
    gpu: Gpu | None = None
    threads: int = 0                    # 0: one for each core it gets
    cpus: tuple[int, ...] = ()
    node: int | None = None             # NUMA node of its memory; None: not decided yet, or not bound
    why: str = ""
    domain: Domain | None = None        # None: not decided yet, or its [[worker]] table names the CPUs
    listed: bool = False                # has a [[worker]] table


def asked(topology: Topology, overrides: Sequence[WorkerOverride]) -> list[Placement]:
    """The workers of the [[worker]] tables, checked against the machine.  Raises PlacementError."""
    gpus = {gpu.index: gpu for gpu in topology.gpus}
    owner: dict[str, int] = {}          # device or CPU -> number of its [[worker]] table
    workers = []
    for i, override in enumerate(overrides):
        where = f"[[worker]] {i}"
        if override.gpu is not None and override.gpu not in gpus:
            there = f"there are GPUs {ranges(gpus)}" if gpus else "there is no GPU"
            raise PlacementError(f"{where} asks for {override.device}; {there}")
        # An encoder and a prefill-decode worker may share a GPU, two of a role may not.
        device = [f"{override.device} for another {override.role}"] if override.gpu is not None else []
        for thing in device + [f"CPU {cpu}" for cpu in override.cpus]:
            if thing in owner:
                raise PlacementError(f"{where} asks for {thing}, which [[worker]] {owner[thing]} has")
            owner[thing] = i
        worker = Placement(override.role, gpu=None if override.gpu is None else gpus[override.gpu],
                           threads=override.threads, cpus=override.cpus, node=override.numa_node, listed=True)
        if override.cpus:
            _check_cpus(worker, where, topology)
        workers.append(worker)
    return workers


def _check_cpus(worker: Placement, where: str, topology: Topology) -> None:
    """Check a worker whose table names its CPUs, and set its threads and NUMA node."""
    cpus = {cpu.id: cpu for cpu in topology.cpus}
    absent = set(worker.cpus) - set(cpus)
    if absent:
        raise PlacementError(f"{where} asks for CPUs {ranges(absent)}; this process may use {ranges(cpus)}")
    cores = len({cpus[cpu].core for cpu in worker.cpus})
    if worker.threads > cores:
        raise PlacementError(f"{where} asks for {plural(worker.threads, 'thread')} on CPUs {ranges(worker.cpus)}, "
                             f"which are {plural(cores, 'core')}")
    worker.threads = worker.threads or cores
    with_memory = {node.id for node in topology.nodes if node.has_memory}
    if worker.node is not None and worker.node not in with_memory:
        raise domains.refuse(worker.node, topology)
    nodes = {cpus[cpu].node for cpu in worker.cpus}
    if worker.node is None and len(nodes) == 1 and nodes <= with_memory:
        worker.node = nodes.pop()
    worker.why = "its CPUs as asked"
    if worker.node is None:
        worker.why += "; memory is not bound: they are not all in one NUMA node with memory"


def fill(topology: Topology, workers: Sequence[Placement], parts: Sequence[Domain]) -> list[Placement]:
    """Give CPUs to each of `workers`; returns encoders, then prefill-decode workers.  Raises PlacementError."""
    unplaced = [worker for worker in workers if not worker.cpus]
    if unplaced and not parts:
        raise PlacementError(f"the [[worker]] tables take all {plural(topology.cores, 'core')}; "
                             f"{plural(len(unplaced), 'more worker')} need at least one")
    _assign(topology, unplaced, parts)
    for domain in parts:
        _cut(domain, [worker for worker in unplaced if worker.domain is domain])
    # Workers of tables and on GPUs keep their order; the others are numbered by NUMA node.
    return sorted(workers, key=lambda worker: (
        worker.role, 0 if worker.listed or worker.gpu or not worker.domain else 1 + parts.index(worker.domain)))


def _assign(topology: Topology, workers: Sequence[Placement], parts: Sequence[Domain]) -> None:
    """Choose each worker's domain.

    Prefill-decode workers on CPUs go to the last of the largest domains: the first one serves the daemon and most
    interrupts.  Encoders go where most cores are left.
    """
    for worker in workers:
        if worker.node is not None:
            chosen = [domain for domain in parts if domain.node == worker.node]
            if not chosen:
                raise domains.refuse(worker.node, topology)
            worker.domain, worker.why = chosen[0], "as asked"
    for worker in workers:
        if worker.gpu and not worker.domain:
            worker.domain, worker.why = _near(worker.gpu, topology, workers, parts)
    for role, last in (("pd", True), ("encoder", False)):
        for worker in workers:
            if worker.role == role and not worker.domain:
                worker.domain = min(reversed(parts) if last else parts, key=lambda domain: (
                    _on_cpus(domain, role, workers), _on_cpus(domain, "pd", workers), -_room(domain, workers)))


def _near(gpu: Gpu, topology: Topology, workers: Sequence[Placement], parts: Sequence[Domain]) -> tuple[Domain, str]:
    """The GPU's own NUMA node, or else the nearest one with CPUs and memory; and why."""
    for domain in parts:
        if domain.node is not None and domain.node == gpu.numa_node:
            return domain, "the GPU's own"
    own = next((node for node in topology.nodes if node.id == gpu.numa_node), None)
    away = [(distance, -_room(domain, workers), i) for i, domain in enumerate(parts)
            if own and domain.node is not None and (distance := own.distance(domain.node)) is not None]
    if away:
        return parts[min(away)[2]], "the nearest to the GPU's"
    near = [domain for domain in parts if set(gpu.cpus) & {*domain.fast, *domain.slow}]
    return max(near or parts, key=lambda domain: _room(domain, workers)), (
        "among the GPU's near CPUs, where most are free" if near and len(near) < len(parts)
        else "where most are free: the machine does not say where the GPU is")


def _on_cpus(domain: Domain, role: str, workers: Sequence[Placement]) -> int:
    return sum(worker.domain is domain and worker.role == role and not worker.gpu for worker in workers)


def _room(domain: Domain, workers: Sequence[Placement]) -> int:
    """Cores of a domain that its GPU workers do not need."""
    return domain.cores - sum(HOST_CORES[worker.role] for worker in workers if worker.domain is domain and worker.gpu)


def _cut(domain: Domain, workers: list[Placement]) -> None:
    """Divide a domain's cores between its workers, at least one core for each.

    Workers with one thread may share a core.  Workers with more threads would wait for each other in every step, so
    too few cores for them raise PlacementError.
    """
    if not workers:
        return
    least = sum(max(1, worker.threads) for worker in workers)
    if least > domain.cores:
        domain.spare_daemon()
    if least > domain.cores:
        _crowd(domain, workers)
        return
    spare = domain.cores - least
    for worker in workers:
        if worker.gpu:
            width = worker.threads or min(HOST_CORES[worker.role], 1 + spare)
            spare -= width - max(1, worker.threads)
            _give(worker, domain.take(width), f"{plural(width, 'core')} of {domain.name}, {worker.why}")
    on_cpus = [worker for worker in workers if not worker.gpu]
    encoders, pds = ([worker for worker in on_cpus if worker.role == role] for role in ("encoder", "pd"))
    if _by_kind(domain, encoders, pds):
        return
    total = domain.cores
    widths = _widths(pds, _pd_cores(total, encoders, pds))
    widths += _widths(encoders, total - sum(widths))
    halved = bool(encoders and pds) and not any(worker.threads for worker in (*encoders, *pds))
    for worker, width in zip([*pds, *encoders], widths):
        part = f"{width} of the {plural(total, 'core')}" if width < total else f"the {plural(total, 'core')}"
        detail = f", {plural(worker.threads, 'thread')} as asked" if worker.threads else ""
        _give(worker, domain.take(width), f"{part} left of {domain.name}{detail}"
              f"{'; the two roles get half each' if halved else ''}")


def _crowd(domain: Domain, workers: list[Placement]) -> None:
    if max(worker.threads for worker in workers) > 1:
        wanted = Counter((worker.role, worker.gpu is not None, worker.threads) for worker in sorted(
            workers, key=lambda worker: worker.role, reverse=True))
        listed = [f"{number} x {role}{' on a GPU' * gpu} with "
                  f"{plural(threads, 'thread') if threads else 'at least one core'}"
                  for (role, gpu, threads), number in wanted.items()]
        raise PlacementError(f"{plural(domain.cores, 'physical core')} {'is' if domain.cores == 1 else 'are'} free on "
                             f"{domain.name}; asked for: {' and '.join(listed)}")
    cores = domain.fast + domain.slow
    for i, worker in enumerate(sorted(workers, key=lambda worker: (not worker.gpu, worker.role == "encoder"))):
        _give(worker, (cores[i % len(cores)],),
              f"one core, shared: {domain.name} has {plural(len(cores), 'core')} for {len(workers)} workers")


def _by_kind(domain: Domain, encoders: list[Placement], pds: list[Placement]) -> bool:
    """On hybrid processors: performance cores for encoders, efficiency cores for prefill-decode.  False: not possible.

    A worker whose threads run on cores of both kinds waits for the slow ones.  Decoding waits for memory, which
    efficiency cores do as well.
    """
    if any(worker.threads for worker in (*encoders, *pds)) or len(domain.fast) < len(encoders) or not domain.slow:
        return False
    if len(domain.slow) < len(pds) or not encoders:
        return False
    fast, slow = domain.fast, domain.slow
    for workers, cores, kind in ((encoders, fast, "performance cores: encoding computes"),
                                 (pds, slow, "efficiency cores: decoding waits for memory")):
        ends = [0, *accumulate(_widths(workers, len(cores)))]
        for worker, start, end in zip(workers, ends, ends[1:]):
            _give(worker, tuple(cores[start:end]), f"{end - start} of {domain.name}'s {kind}")
    return True


def _pd_cores(free: int, encoders: list[Placement], pds: list[Placement]) -> int:
    """Cores for all prefill-decode workers of a domain.

    By default the two roles get half each: a request's prefill and decode cost about what encoding its
    images does.  If `threads` fixes one role, the other gets the rest.
    """
    if not pds:
        return 0
    if all(worker.threads for worker in pds):
        return sum(worker.threads for worker in pds)
    if all(worker.threads for worker in encoders):
        return free - sum(worker.threads for worker in encoders)
    least, others = (sum(max(1, worker.threads) for worker in workers) for workers in (pds, encoders))
    return min(max(-(-free // 2), least), free - others)


def _widths(workers: list[Placement], cores: int) -> list[int]:
    """Cores for each of a role's workers: its `threads`, or an even part of what those leave of `cores`."""
    rest = cores - sum(worker.threads for worker in workers)
    sharing = sum(not worker.threads for worker in workers)
    ends = iter([rest * (i + 1) // sharing - rest * i // sharing for i in range(sharing)])
    return [worker.threads or next(ends) for worker in workers]


def _give(worker: Placement, cpus: tuple[int, ...], why: str) -> None:
    assert worker.domain is not None
    worker.cpus, worker.node, worker.threads, worker.why = cpus, worker.domain.node, len(cpus), why
