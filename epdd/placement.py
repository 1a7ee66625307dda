"""Which worker runs where: topology and settings in, worker specs out.  Pure; nothing is started or bound.

The machine is seen as domains: NUMA nodes that have CPUs and memory, each with its free physical cores.
Workers take whole cores from one domain, so their memory is local.  Of a core with hyperthreads only one
logical CPU is used: a second thread on it would slow the first, and the siblings are left to the daemon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from epdd import arena
from epdd.config import Config
from epdd.errors import PlacementError
from epdd.families import Family
from epdd.hardware.topology import Gpu, Topology, ranges
from epdd.wire import WorkerSpec

ARENA_BYTES_MIN = 64 << 20
ARENA_BYTES_MAX = 4 << 30           # unless the operator asks for more
KV_BYTES_MAX = 8 << 30              # likewise
IMAGES_IN_ARENA = 1024              # of the largest size: more are never in flight
DAEMON_CORES_FROM = 8               # cores a machine must have before one is kept free for the daemon
# Cores a GPU worker keeps busy: launching kernels is one thread; an encoder also decodes the next image.
HOST_CORES = {"encoder": 2, "pd": 1}


@dataclass
class _Domain:
    node: int | None                # None: no NUMA node; memory is not bound
    free: list[int]                 # one logical CPU of each core not taken
    cores: int                      # at the start
    encoders: int = 0               # on CPUs
    pds: int = 0                    # on CPUs

    def take(self, count: int) -> tuple[int, ...]:
        """`count` cores, or fewer: the last core stays and is shared, so that no worker is without one."""
        count = max(1, min(count, len(self.free) - 1))
        taken = tuple(self.free[:count])
        if len(self.free) > count:
            del self.free[:count]
        return taken


@dataclass
class _Seat:
    """One worker's place before the sizes that all share are filled in."""

    role: str
    domain: _Domain
    cpus: tuple[int, ...]
    gpu: Gpu | None = None


@dataclass(frozen=True)
class _Counts:
    gpu_encoders: int
    gpu_pds: int
    cpu_encoders: int
    cpu_pds: int


def arena_bytes(config: Config, topology: Topology, family: Family) -> int:
    """Size of the arena in bytes, whole pages.  Raises PlacementError if memory cannot hold it."""
    image = family.embedding_bytes(family.rows_max)
    size = config.arena.bytes
    if not size:
        size = min(ARENA_BYTES_MAX, IMAGES_IN_ARENA * image, (topology.memory_bytes or ARENA_BYTES_MAX * 4) // 4)
        size = max(size, ARENA_BYTES_MIN, image)
    if topology.memory_bytes and size > topology.memory_bytes:
        reason = "arena.bytes" if config.arena.bytes else "the largest image's embedding"
        raise PlacementError(f"{reason} is {_size(size)}; the machine has {_size(topology.memory_bytes)} of memory")
    return -(-size // arena.PAGE) * arena.PAGE


def plan(topology: Topology, config: Config, family: Family, arena_bytes: int) -> list[WorkerSpec]:
    """The workers: encoders on GPUs, encoders on CPUs, then prefill-decode.  Raises PlacementError."""
    domains = _domains(topology)
    counts = _counts(topology, config, domains)
    if sum(domain.cores for domain in domains) >= DAEMON_CORES_FROM:
        domains[0].take(1)
    seats = _seat_on_gpus(topology, counts, domains)
    _spread(counts, domains)
    for domain in domains:
        seats += _seat_on_cpus(domain, config)
    return _specs(seats, topology, config, family, arena_bytes)


def _domains(topology: Topology) -> list[_Domain]:
    """NUMA nodes with CPUs and memory, ascending; without any, all CPUs together and memory unbound."""
    first: dict[int, int] = {}      # core -> its lowest usable CPU
    node_of: dict[int, int | None] = {}
    for cpu in topology.cpus:
        first.setdefault(cpu.core, cpu.id)
        node_of.setdefault(cpu.core, cpu.node)
    with_memory = [node.id for node in topology.nodes if node.has_memory]
    domains = []
    for node in with_memory:
        cores = [cpu for core, cpu in sorted(first.items()) if node_of[core] == node]
        if cores:
            domains.append(_Domain(node, cores, len(cores)))
    if not domains and first:
        domains.append(_Domain(None, sorted(first.values()), len(first)))
    if not domains:
        raise PlacementError("there is no CPU that this process may use; at least one is needed")
    return domains


def _counts(topology: Topology, config: Config, domains: list[_Domain]) -> _Counts:
    gpus, pds = len(topology.gpus), config.pd.workers
    if not gpus:
        return _Counts(0, 0, config.encoder.workers or len(domains), pds or 1)
    if pds > gpus:
        raise PlacementError(f"pd.workers is {pds}; there are {gpus} GPUs, and each takes one such worker")
    # One GPU encoder feeds several PD workers: decoding keeps a GPU busy far longer than encoding did.
    pds = pds or max(1, gpus - 1)
    gpu_encoders = gpus - pds if config.pd.workers else min(1, gpus - pds)
    if config.encoder.workers:
        gpu_encoders = min(gpu_encoders, config.encoder.workers)
        return _Counts(gpu_encoders, pds, config.encoder.workers - gpu_encoders, 0)
    return _Counts(gpu_encoders, pds, len(domains), 0)


def _seat_on_gpus(topology: Topology, counts: _Counts, domains: list[_Domain]) -> list[_Seat]:
    roles = ["encoder"] * counts.gpu_encoders + ["pd"] * counts.gpu_pds
    seats = []
    for role, gpu in zip(roles, topology.gpus):
        near = [domain for domain in domains if domain.node is not None and domain.node == gpu.numa_node]
        domain = near[0] if near else max(domains, key=lambda domain: len(domain.free))
        cpus = domain.take(HOST_CORES[role])
        seats.append(_Seat(role, domain, cpus, gpu))
    return seats


def _spread(counts: _Counts, domains: list[_Domain]) -> None:
    """Give each domain its share of the workers on CPUs.

    PD workers go to the last of the largest domains: the first one serves the daemon and most interrupts.
    Encoders go where most cores are left.
    """
    for _ in range(counts.cpu_pds):
        min(reversed(domains), key=lambda domain: (domain.pds, -len(domain.free))).pds += 1
    for _ in range(counts.cpu_encoders):
        min(domains, key=lambda domain: (domain.encoders, domain.pds, -len(domain.free))).encoders += 1


def _seat_on_cpus(domain: _Domain, config: Config) -> list[_Seat]:
    """Cut a domain's free cores between its PD workers and its encoders.

    Workers with one thread each may share cores; wider ones would wait for each other in every step, which
    is refused.
    """
    free, encoders, pds = len(domain.free), domain.encoders, domain.pds
    pd_cores = _pd_cores(domain, config)
    widths = (_widths(pds, config.pd.threads, pd_cores)
              + _widths(encoders, config.encoder.threads, free - pd_cores))
    if sum(widths) <= free:
        ends = list(accumulate(widths))
        cpus = [tuple(domain.free[end - width:end]) for end, width in zip(ends, widths)]
    elif max(widths) == 1:
        cpus = [(domain.free[i % free],) for i in range(len(widths))]
    else:
        where = "" if domain.node is None else f" on NUMA node {domain.node}"
        raise PlacementError(f"{free} physical cores are free{where}; asked for: "
                             f"{_wish('pd', pds, config.pd.threads)} and "
                             f"{_wish('encoder', encoders, config.encoder.threads)}")
    roles = ["pd"] * pds + ["encoder"] * encoders
    return [_Seat(role, domain, own) for role, own in zip(roles, cpus)]


def _pd_cores(domain: _Domain, config: Config) -> int:
    """Cores for all PD workers of a domain.

    By default the two roles get half each: a request's prefill and decode cost about what encoding its
    images does.  Where `threads` fixes one role, the other gets what is left.
    """
    free, encoders, pds = len(domain.free), domain.encoders, domain.pds
    if not pds:
        return 0
    if config.pd.threads:
        return pds * config.pd.threads
    if config.encoder.threads or not encoders:
        return free - encoders * config.encoder.threads
    return min(max(-(-free // 2), pds), max(free - encoders, pds))


def _widths(workers: int, threads: int, cores: int) -> list[int]:
    """Cores for each of a role's workers: as told, or even parts of `cores`, at least one each."""
    return [threads or max(1, cores * (i + 1) // workers - cores * i // workers) for i in range(workers)]


def _wish(role: str, workers: int, threads: int) -> str:
    width = f"{threads} threads" if threads else "at least one core"
    return f"{workers} x {role} with {width}"


def _specs(seats: list[_Seat], topology: Topology, config: Config, family: Family,
           arena_bytes: int) -> list[WorkerSpec]:
    encoders = [seat for seat in seats if seat.role == "encoder"]
    pds = [seat for seat in seats if seat.role == "pd"]
    common = WorkerSpec(
        name="", role="", device="cpu", cpus=(), numa_node=None, threads=0, model=family.folder,
        dtype=config.model.dtype, arena_bytes=arena_bytes, token_budget=config.pd.token_budget,
        batch_max=config.pd.batch_max, context_max=config.model.context_max, log_level=config.log.level)
    slices = arena.slices(arena_bytes, len(encoders))
    specs = []
    for i, seat in enumerate(encoders):
        specs.append(replace(_seated(common, seat, i), arena_slice=slices[i]))
    for i, seat in enumerate(pds):
        kv_bytes = _kv_bytes(config, seat, topology, len(pds))
        specs.append(replace(_seated(common, seat, i), kv_tokens=config.pd.kv_tokens, kv_bytes=kv_bytes))
    return specs


def _seated(common: WorkerSpec, seat: _Seat, i: int) -> WorkerSpec:
    return replace(common, name=f"{seat.role}/{i}", role=seat.role, cpus=seat.cpus, threads=len(seat.cpus),
                   device="cpu" if seat.gpu is None else f"cuda:{seat.gpu.index}", numa_node=seat.domain.node)


def _kv_bytes(config: Config, seat: _Seat, topology: Topology, pds: int) -> int:
    """KV cache of one PD worker, in its device's memory; PD workers on CPUs share the machine's."""
    memory = topology.memory_bytes if seat.gpu is None else seat.gpu.memory_bytes
    if config.pd.kv_bytes:
        if memory and config.pd.kv_bytes > memory:
            raise PlacementError(f"pd.kv_bytes is {_size(config.pd.kv_bytes)}; the "
                                 f"{'machine' if seat.gpu is None else 'GPU'} has {_size(memory)} of memory")
        return config.pd.kv_bytes
    share = (memory or KV_BYTES_MAX * 8) // 8
    if seat.gpu is not None:
        return min(KV_BYTES_MAX, share)
    # It is bound to one NUMA node, which must also hold the weights and an encoder.
    own = [node.memory_bytes for node in topology.nodes if node.id == seat.domain.node and node.memory_bytes]
    return min(KV_BYTES_MAX, share // pds, *(memory // 2 // seat.domain.pds for memory in own))


def explain(specs: Sequence[WorkerSpec], topology: Topology) -> str:
    """The plan as text for people, at most 100 columns where the CPU lists allow it."""
    header = ("WORKER", "DEVICE", "NUMA", "CPUS", "THREADS", "MEMORY")
    rows = [header]
    for spec in specs:
        memory = f"KV {_size(spec.kv_bytes)}" if spec.role == "pd" else f"arena {_size(spec.arena_slice[1])}"
        node = "-" if spec.numa_node is None else str(spec.numa_node)
        rows.append((spec.name, spec.device, node, ranges(spec.cpus), str(spec.threads), memory))
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    left = {cpu.id for cpu in topology.cpus}.difference(*(spec.cpus for spec in specs))
    return "\n".join([_machine(topology), "", *table, "",
                      f"left to the daemon and the system: CPUs {ranges(left) or 'none of their own'}",
                      *(f"warning: {warning}" for warning in topology.warnings)])


def _machine(topology: Topology) -> str:
    kinds: dict[str, int] = {}
    for gpu in topology.gpus:
        kinds[gpu.name] = kinds.get(gpu.name, 0) + 1
    parts = [_count(topology.sockets, "socket"), _count(len(topology.nodes), "NUMA node"),
             f"{_count(topology.cores, 'core')} ({_count(len(topology.cpus), 'CPU')})",
             f"{_size(topology.memory_bytes)} memory" if topology.memory_bytes else "memory unknown",
             ", ".join(f"{number} x {name}" for name, number in kinds.items()) or "no GPU",
             "AMX" if topology.amx else "AVX512-BF16" if topology.bf16 else "no bfloat16 on CPUs"]
    return f"{topology.model or 'unknown CPU'}: {', '.join(parts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _size(size: int) -> str:
    """Bytes for people: "1.5 GiB"."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= scale:
            return f"{size / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} bytes"
