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
class Seat:
    """One worker's place before the sizes that all share are filled in."""

    role: str
    gpu: Gpu | None = None
    threads: int = 0                    # 0: one for each core it gets
    cpus: tuple[int, ...] = ()
    node: int | None = None             # of its memory; None until it is known, or not bound
    why: str = ""
    domain: Domain | None = None        # None: its CPUs were given
    listed: bool = False                # in a [[worker]] table


def asked(topology: Topology, wishes: Sequence[WorkerOverride]) -> list[Seat]:
    """Seats of the [[worker]] tables, checked against what is there.  Raises PlacementError."""
    gpus = {gpu.index: gpu for gpu in topology.gpus}
    owner: dict[str, int] = {}          # of a device or CPU: the table that has it
    seats = []
    for i, wish in enumerate(wishes):
        where = f"[[worker]] {i}"
        if wish.gpu is not None and wish.gpu not in gpus:
            there = f"there are GPUs {ranges(gpus)}" if gpus else "there is no GPU"
            raise PlacementError(f"{where} asks for {wish.device}; {there}")
        # An encoder and a prefill-decode worker may share a GPU, two of a role may not.
        device = [f"{wish.device} for another {wish.role}"] if wish.gpu is not None else []
        for thing in device + [f"CPU {cpu}" for cpu in wish.cpus]:
            if thing in owner:
                raise PlacementError(f"{where} asks for {thing}, which [[worker]] {owner[thing]} has")
            owner[thing] = i
        seat = Seat(wish.role, gpu=None if wish.gpu is None else gpus[wish.gpu], threads=wish.threads, cpus=wish.cpus,
                    node=wish.numa_node, listed=True)
        if wish.cpus:
            _check_cpus(seat, where, topology)
        seats.append(seat)
    return seats


def _check_cpus(seat: Seat, where: str, topology: Topology) -> None:
    """Complete a seat whose CPUs the operator chose."""
    cpus = {cpu.id: cpu for cpu in topology.cpus}
    absent = set(seat.cpus) - set(cpus)
    if absent:
        raise PlacementError(f"{where} asks for CPUs {ranges(absent)}; this process may use {ranges(cpus)}")
    cores = len({cpus[cpu].core for cpu in seat.cpus})
    if seat.threads > cores:
        raise PlacementError(f"{where} asks for {plural(seat.threads, 'thread')} on CPUs {ranges(seat.cpus)}, "
                             f"which are {plural(cores, 'core')}")
    seat.threads = seat.threads or cores
    with_memory = {node.id for node in topology.nodes if node.has_memory}
    if seat.node is not None and seat.node not in with_memory:
        raise domains.refuse(seat.node, topology)
    nodes = {cpus[cpu].node for cpu in seat.cpus}
    if seat.node is None and len(nodes) == 1 and nodes <= with_memory:
        seat.node = nodes.pop()
    seat.why = "its CPUs as asked"
    if seat.node is None:
        seat.why += "; memory is not bound: they are not all in one NUMA node with memory"


def fill(topology: Topology, seats: Sequence[Seat], parts: Sequence[Domain]) -> list[Seat]:
    """All seats with their CPUs: encoders, then prefill-decode.  Raises PlacementError."""
    open_seats = [seat for seat in seats if not seat.cpus]
    if open_seats and not parts:
        raise PlacementError(f"the [[worker]] tables take all {plural(topology.cores, 'core')}; "
                             f"{plural(len(open_seats), 'more worker')} need at least one")
    _assign(topology, open_seats, parts)
    for domain in parts:
        _cut(domain, [seat for seat in open_seats if seat.domain is domain])
    # Tables keep their order, GPUs theirs; the rest is named by NUMA node.
    return sorted(seats, key=lambda seat: (
        seat.role, 0 if seat.listed or seat.gpu or not seat.domain else 1 + parts.index(seat.domain)))


def _assign(topology: Topology, seats: Sequence[Seat], parts: Sequence[Domain]) -> None:
    """Choose each seat's domain.

    Prefill-decode workers on CPUs go to the last of the largest domains: the first one serves the daemon and most
    interrupts.  Encoders go where most cores are left.
    """
    for seat in seats:
        if seat.node is not None:
            chosen = [domain for domain in parts if domain.node == seat.node]
            if not chosen:
                raise domains.refuse(seat.node, topology)
            seat.domain, seat.why = chosen[0], "as asked"
    for seat in seats:
        if seat.gpu and not seat.domain:
            seat.domain, seat.why = _near(seat.gpu, topology, seats, parts)
    for role, last in (("pd", True), ("encoder", False)):
        for seat in seats:
            if seat.role == role and not seat.domain:
                seat.domain = min(reversed(parts) if last else parts, key=lambda domain: (
                    _on_cpus(domain, role, seats), _on_cpus(domain, "pd", seats), -_room(domain, seats)))


def _near(gpu: Gpu, topology: Topology, seats: Sequence[Seat], parts: Sequence[Domain]) -> tuple[Domain, str]:
    """The GPU's own NUMA node, or else the nearest one where a worker can sit."""
    for domain in parts:
        if domain.node is not None and domain.node == gpu.numa_node:
            return domain, "the GPU's own"
    own = next((node for node in topology.nodes if node.id == gpu.numa_node), None)
    away = [(distance, -_room(domain, seats), i) for i, domain in enumerate(parts)
            if own and domain.node is not None and (distance := own.distance(domain.node)) is not None]
    if away:
        return parts[min(away)[2]], "the nearest to the GPU's"
    near = [domain for domain in parts if set(gpu.cpus) & {*domain.fast, *domain.slow}]
    return max(near or parts, key=lambda domain: _room(domain, seats)), (
        "among the GPU's near CPUs, where most are free" if near and len(near) < len(parts)
        else "where most are free: the machine does not say where the GPU is")


def _on_cpus(domain: Domain, role: str, seats: Sequence[Seat]) -> int:
    return sum(seat.domain is domain and seat.role == role and not seat.gpu for seat in seats)


def _room(domain: Domain, seats: Sequence[Seat]) -> int:
    """Cores that the GPU workers of a domain leave."""
    return domain.cores - sum(HOST_CORES[seat.role] for seat in seats if seat.domain is domain and seat.gpu)


def _cut(domain: Domain, seats: list[Seat]) -> None:
    """Cut a domain's cores between its workers, at least one core for each.

    Workers with one thread each may share cores; wider ones would wait for each other in every step, which is
    refused.
    """
    if not seats:
        return
    least = sum(max(1, seat.threads) for seat in seats)
    if least > domain.cores:
        domain.spare_daemon()
    if least > domain.cores:
        _crowd(domain, seats)
        return
    spare = domain.cores - least
    for seat in seats:
        if seat.gpu:
            width = seat.threads or min(HOST_CORES[seat.role], 1 + spare)
            spare -= width - max(1, seat.threads)
            _give(seat, domain.take(width), f"{plural(width, 'core')} of {domain.name}, {seat.why}")
    encoders, pds = ([seat for seat in seats if seat.role == role and not seat.gpu] for role in ("encoder", "pd"))
    if _by_kind(domain, encoders, pds):
        return
    total = domain.cores
    widths = _widths(pds, _pd_cores(total, encoders, pds))
    widths += _widths(encoders, total - sum(widths))
    halved = bool(encoders and pds) and not any(seat.threads for seat in (*encoders, *pds))
    for seat, width in zip([*pds, *encoders], widths):
        part = f"{width} of the {plural(total, 'core')}" if width < total else f"the {plural(total, 'core')}"
        detail = f", {plural(seat.threads, 'thread')} as asked" if seat.threads else ""
        _give(seat, domain.take(width), f"{part} left of {domain.name}{detail}"
              f"{'; the two roles get half each' if halved else ''}")


def _crowd(domain: Domain, seats: list[Seat]) -> None:
    if max(seat.threads for seat in seats) > 1:
        wishes = Counter((seat.role, seat.gpu is not None, seat.threads) for seat in sorted(
            seats, key=lambda seat: seat.role, reverse=True))
        listed = [f"{number} x {role}{' on a GPU' * gpu} with "
                  f"{plural(threads, 'thread') if threads else 'at least one core'}"
                  for (role, gpu, threads), number in wishes.items()]
        raise PlacementError(f"{plural(domain.cores, 'physical core')} {'is' if domain.cores == 1 else 'are'} free on "
                             f"{domain.name}; asked for: {' and '.join(listed)}")
    cores = domain.fast + domain.slow
    for i, seat in enumerate(sorted(seats, key=lambda seat: (not seat.gpu, seat.role == "encoder"))):
        _give(seat, (cores[i % len(cores)],),
              f"one core, shared: {domain.name} has {plural(len(cores), 'core')} for {len(seats)} workers")


def _by_kind(domain: Domain, encoders: list[Seat], pds: list[Seat]) -> bool:
    """On hybrid processors a worker's threads must be of one kind: they would wait for the slowest.

    Decoding waits for memory, which slow cores can do as well.
    """
    if any(seat.threads for seat in (*encoders, *pds)) or len(domain.fast) < len(encoders) or not domain.slow:
        return False
    if len(domain.slow) < len(pds) or not encoders:
        return False
    fast, slow = domain.fast, domain.slow
    for seats, cores, kind in ((encoders, fast, "performance cores: encoding computes"),
                               (pds, slow, "efficiency cores: decoding waits for memory")):
        ends = [0, *accumulate(_widths(seats, len(cores)))]
        for seat, start, end in zip(seats, ends, ends[1:]):
            _give(seat, tuple(cores[start:end]), f"{end - start} of {domain.name}'s {kind}")
    return True


def _pd_cores(free: int, encoders: list[Seat], pds: list[Seat]) -> int:
    """Cores for all prefill-decode workers of a domain.

    By default the two roles get half each: a request's prefill and decode cost about what encoding its
    images does.  Where `threads` fixes one role, the other gets what is left.
    """
    if not pds:
        return 0
    if all(seat.threads for seat in pds):
        return sum(seat.threads for seat in pds)
    if all(seat.threads for seat in encoders):
        return free - sum(seat.threads for seat in encoders)
    least, others = (sum(max(1, seat.threads) for seat in seats) for seats in (pds, encoders))
    return min(max(-(-free // 2), least), free - others)


def _widths(seats: list[Seat], cores: int) -> list[int]:
    """Cores for each of a role's workers: as told, or even parts of what the others leave of `cores`."""
    rest = cores - sum(seat.threads for seat in seats)
    sharing = sum(not seat.threads for seat in seats)
    ends = iter([rest * (i + 1) // sharing - rest * i // sharing for i in range(sharing)])
    return [seat.threads or next(ends) for seat in seats]


def _give(seat: Seat, cpus: tuple[int, ...], why: str) -> None:
    assert seat.domain is not None
    seat.cpus, seat.node, seat.threads, seat.why = cpus, seat.domain.node, len(cpus), why
