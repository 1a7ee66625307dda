"""Where workers can run: NUMA nodes with CPUs and memory, and their free physical cores."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from epdd.errors import PlacementError
from epdd.hardware.topology import EFFICIENCY, NumaNode, Topology, plural, ranges

DAEMON_CORES_FROM = 8       # cores a machine must have before one is kept free for the daemon


@dataclass
class Domain:
    node: int | None            # None: no NUMA node; memory is not bound
    fast: list[int]             # one logical CPU of each free core; on hybrid processors, performance cores only
    slow: list[int]             # likewise of efficiency cores
    daemon_core: int | None = None      # kept free for the daemon, unless the workers need it

    @property
    def cores(self) -> int:
        return len(self.fast) + len(self.slow)

    @property
    def name(self) -> str:
        return "the machine" if self.node is None else f"NUMA node {self.node}"

    def take(self, count: int) -> tuple[int, ...]:
        """The first `count` cores, performance cores before efficiency cores."""
        taken = (self.fast + self.slow)[:count]
        self.fast, self.slow = self.fast[len(taken):], self.slow[max(0, len(taken) - len(self.fast)):]
        return tuple(taken)

    def spare_daemon(self) -> None:
        """Give the daemon's core to the workers."""
        if self.daemon_core is not None:
            self.fast.insert(0, self.daemon_core)
            self.daemon_core = None


def read(topology: Topology, taken: Collection[int]) -> tuple[list[Domain], list[str]]:
    """The domains, by NUMA node, and the reasons for what is left out.

    If no NUMA node has CPUs and memory, one domain holds all CPUs, and memory is not bound.  `taken` CPUs belong to
    workers whose [[worker]] tables name them: their cores are in no domain.  Raises PlacementError without a CPU.
    """
    if not topology.cpus:
        raise PlacementError("there is no CPU that this process may use; at least one is needed")
    first: dict[int, int] = {}          # core -> its lowest usable CPU
    for cpu in topology.cpus:
        first.setdefault(cpu.core, cpu.id)
    lost = {cpu.core for cpu in topology.cpus if cpu.id in taken}
    cpus = [cpu for cpu in topology.cpus if cpu.id == first[cpu.core] and cpu.core not in lost]
    with_memory = [node.id for node in topology.nodes if node.has_memory]
    domains = [Domain(node, [cpu.id for cpu in cpus if cpu.node == node and cpu.kind != EFFICIENCY],
                      [cpu.id for cpu in cpus if cpu.node == node and cpu.kind == EFFICIENCY]) for node in with_memory]
    domains = [domain for domain in domains if domain.cores]
    if not any(cpu.node in with_memory for cpu in topology.cpus) and cpus:
        domains = [Domain(None, [cpu.id for cpu in cpus if cpu.kind != EFFICIENCY],
                          [cpu.id for cpu in cpus if cpu.kind == EFFICIENCY])]
    why = _why(topology, domains, lost)
    domains = _within_quota(topology, domains, len(lost), why)
    placed = {cpu for domain in domains for cpu in (*domain.fast, *domain.slow)}
    orphans = topology.cpu_quota is None and {cpu.id for cpu in cpus} - placed      # enough for the daemon
    if not orphans and len(placed) >= DAEMON_CORES_FROM and domains[0].cores > 1:
        slow = domains[0].slow
        domains[0].daemon_core = slow.pop(0) if slow else domains[0].fast.pop(0)
    return domains, why


def _why(topology: Topology, domains: list[Domain], lost: Collection[int]) -> list[str]:
    why = []
    if topology.barred:
        why.append(f"CPUs {ranges(topology.barred)} are on but not ours: a cpuset or the affinity leaves "
                   f"{ranges(cpu.id for cpu in topology.cpus)}")
    if topology.offline:
        why.append(f"CPUs {ranges(topology.offline)} are switched off")
    if len(topology.cpus) > topology.cores:
        why.append(f"{plural(topology.cores, 'core')} count, not {len(topology.cpus)} CPUs: "
                   "a second thread on a core would slow the first")
    if lost:
        why.append(f"{plural(len(lost), 'core')} belong{'s' * (len(lost) == 1)} to workers whose cpus are given")
    if domains and domains[0].node is None:
        why.append("no NUMA node has CPUs and memory: all CPUs count as one, memory is not bound")
    elif any(cpu.node is None for cpu in topology.cpus):
        why.append(f"CPUs {ranges(cpu.id for cpu in topology.cpus if cpu.node is None)} are in no NUMA node of "
                   "their own: left to the system")
    return why


def _within_quota(topology: Topology, domains: list[Domain], lost: int, why: list[str]) -> list[Domain]:
    """The domains, cut to the number of cores that the cgroup's quota pays for.

    With more cores, all threads would use up the quota early in each period and then stop until the next one.
    """
    if topology.cpu_quota is None:
        return domains
    left = max(1, int(topology.cpu_quota) - lost)
    if left >= sum(domain.cores for domain in domains):
        return domains
    why.append(f"{plural(left, 'core')} can be used: the cgroup's quota grants the time of {topology.cpu_quota:g} CPUs")
    kept = []
    for domain in domains:
        if left:
            fast = domain.fast[:left]
            slow = domain.slow[:left - len(fast)]
            left -= len(fast) + len(slow)
            kept.append(Domain(domain.node, fast, slow))
    return kept


def kept(domains: list[Domain]) -> list[str]:
    """Which core is kept free for the daemon, and why."""
    return [f"CPU {domain.daemon_core} is kept for the daemon: there are {DAEMON_CORES_FROM} cores or more"
            for domain in domains if domain.daemon_core is not None]


def unused(topology: Topology, used: Collection[int | None]) -> list[str]:
    """Why NUMA nodes have no worker."""
    faults: dict[str, list[int]] = {}
    for node in topology.nodes:
        if node.id not in used:
            faults.setdefault(_fault(node, topology), []).append(node.id)
    return [f"NUMA node {nodes[0]} has no worker: {fault}" if len(nodes) == 1
            else f"NUMA nodes {ranges(nodes)} have no worker: {fault}" for fault, nodes in faults.items()]


def _fault(node: NumaNode, topology: Topology) -> str:
    faults = []
    if not node.cpus:
        faults.append("no CPUs that this process may use")
    elif not any(cpu.node == node.id for cpu in topology.cpus):
        faults.append("other NUMA nodes claim its CPUs as well")
    if node.memory_bytes == 0:
        faults.append("no memory")
    elif not node.memory_allowed:
        faults.append("a cpuset keeps this process from its memory")
    if not faults and topology.cpu_quota is not None:
        faults.append("the cgroup's CPU quota is used up")
    return " and ".join(faults) or "the settings give its cores to others, or ask for fewer workers"


def refuse(asked: int, topology: Topology) -> PlacementError:
    """The error for a worker that is asked to run on a NUMA node where none can."""
    found = [node for node in topology.nodes if node.id == asked]
    usable = ranges(node.id for node in topology.nodes if node.has_memory
                    and any(cpu.node == node.id for cpu in topology.cpus))
    fault = _fault(found[0], topology) if found else "it is not there"
    return PlacementError(f"NUMA node {asked} is asked for: {fault}; "
                          f"NUMA nodes with CPUs and memory: {usable or 'none'}")
