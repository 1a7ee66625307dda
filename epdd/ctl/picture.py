"""`epdctl topology`: draws the machine and its workers in 100 columns, one letter or digit for each core."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TextIO


from epdd.ctl.render import Paint, shorten, size
from epdd.hardware.topology import EFFICIENCY, Cpu, Gpu, NumaNode, Topology, plural, ranges

COLUMNS = 100
_ENCODERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"         # prefill-decode workers are digits, to tell the roles apart
_PDS = "0123456789abcdefghijklmnopqrstuvwxyz"
_FREE, _SHARED = "·", "*"
_GAP = "  "                     # between two boxes
_ESCAPES = re.compile(r"\x1b\[\d+m")
# As nvidia-smi abbreviates them.
_LINKS = {"NVLink": "NVL", "same board": "BRD", "PCI switch": "PIX", "PCI switches": "PXB", "host bridge": "PHB",
          "NUMA node": "NODE", "sockets": "SYS"}


@dataclass(frozen=True)
class DrawnWorker:
    name: str
    device: str                     # "cpu" or "cuda:N"
    cpus: tuple[int, ...]
    numa_node: int | None
    state: str = "READY"
    abilities: tuple[str, ...] = ()     # instruction sets that torch uses in a running worker

    @property
    def symbol(self) -> str:
        role, _, number = self.name.partition("/")
        symbols = _ENCODERS if role == "encoder" else _PDS
        return symbols[int(number) % len(symbols)]

    @property
    def style(self) -> str:
        return "green" if self.name.startswith("encoder") else "yellow"


def wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ


def draw(topology: Topology, workers: Sequence[DrawnWorker], title: str, colour: bool = False) -> str:
    """The whole picture; `title` says whether the workers run or are planned."""
    picture = _Picture(topology, workers, Paint(colour))
    return "\n".join([*picture.head(), "", *picture.sockets(), *picture.rest(), "", *picture.key(title),
                      *picture.tables(), *picture.notes()])


class _Picture:
    def __init__(self, topology: Topology, workers: Sequence[DrawnWorker], paint: Paint) -> None:
        self._topology = topology
        self._workers = workers
        self._paint = paint
        self._cpu = {cpu.id: cpu for cpu in topology.cpus}

    def head(self) -> list[str]:
        found = self._topology
        parts = [plural(found.sockets, "socket"), plural(len(found.nodes), "NUMA node"),
                 plural(found.cores, "core") + (f" ({len(found.cpus)} CPUs)" if len(found.cpus) > found.cores else ""),
                 f"{size(found.memory_bytes)} memory" if found.memory_bytes else "memory unknown",
                 plural(len(found.gpus), "GPU") if found.gpus else "no GPU"]
        able = [name for name, has in (("AMX", found.amx), ("AVX-512", found.avx512), ("bfloat16", found.bf16)) if has]
        return [self._paint("bold", found.model or "unknown processor"), ", ".join(parts),
                f"computes with {', '.join(able)}" if able else "no bfloat16 in hardware",
                *self._caches()]

    def _caches(self) -> list[str]:
        kinds: dict[tuple[int, int], int] = {}
        for cache in self._topology.caches:
            kinds[cache.level, cache.size_bytes] = kinds.get((cache.level, cache.size_bytes), 0) + 1
        text = ", ".join(f"L{level} {number} x {size(each)}" for (level, each), number in kinds.items())
        return [f"caches: {text}"] if text else []

    def sockets(self) -> list[str]:
        """A box for each socket, which contains a box for each of its NUMA nodes."""
        lines = []
        for socket in sorted({cpu.socket for cpu in self._topology.cpus}):
            cpus = [cpu for cpu in self._topology.cpus if cpu.socket == socket]
            nodes = sorted({cpu.node for cpu in cpus}, key=lambda node: (node is None, node or 0))
            columns = 2 if len(nodes) > 1 else 1
            width = (COLUMNS - 4 - (columns - 1) * len(_GAP)) // columns
            boxes = [self._node(node, [cpu for cpu in cpus if cpu.node == node], width) for node in nodes]
            inner = []
            for i in range(0, len(boxes), columns):
                inner += _beside(boxes[i:i + columns], width)
            name = "socket not told" if socket < 0 else f"socket {socket}"
            lines += _box(self._paint("bold", name), inner, COLUMNS)
        return lines

    def _node(self, node: int | None, cpus: list[Cpu], width: int) -> list[str]:
        found = next((one for one in self._topology.nodes if one.id == node), None)
        name = "in no NUMA node of their own" if found is None else f"NUMA node {node}"
        cores = len({cpu.core for cpu in cpus})
        title = self._paint("bold", name) + (f", {_memory(found)}" if found else "")
        lines = [f"{plural(cores, 'core')}, CPUs {shorten(ranges(cpu.id for cpu in cpus), width - 20)}"]
        for kind, label in (("", ""), ("P", "P "), (EFFICIENCY, "E ")):
            lines += self._cores([cpu for cpu in cpus if cpu.kind == kind], label, width - 4)
        own = {cpu.id for cpu in cpus}
        for worker in self._workers:
            if own & set(worker.cpus):
                lines += self._worker(worker, own, node, width - 4)
        if found:
            lines += [self._gpu(gpu, width - 4) for gpu in self._topology.gpus if gpu.numa_node == node]
        return _box(title, lines, width)

    def _cores(self, cpus: list[Cpu], label: str, width: int) -> list[str]:
        """One cell for each core, with the sign of the worker on it."""
        cells = {cpu.core: self._cell(cpu) for cpu in reversed(cpus)}
        gap = " " if len(cells) * 2 <= 3 * (width - len(label)) else ""
        per_line = (width - len(label)) // (1 + len(gap))
        ordered = [cells[core] for core in sorted(cells)]
        return [(label if start == 0 else " " * len(label)) + gap.join(ordered[start:start + per_line])
                for start in range(0, len(ordered), per_line)]

    def _cell(self, cpu: Cpu) -> str:
        on = [worker for worker in self._workers if set(worker.cpus) & set(cpu.siblings)]
        if not on:
            return self._paint("dim", _FREE)
        return self._paint(on[0].style, on[0].symbol) if len(on) == 1 else _SHARED

    def _worker(self, worker: DrawnWorker, here: set[int], node: int | None, width: int) -> list[str]:
        on = here.intersection(worker.cpus)
        cores = plural(len({self._cpu[cpu].core for cpu in on}), "core")
        device = worker.device.replace("cuda:", "GPU ").replace("cpu", "CPU")
        text = f"{worker.name:<10} {device:6} {cores:>8}  CPU{'s' * (len(on) > 1)} {ranges(on)}"
        lines = [f"{self._paint(worker.style, worker.symbol)} {shorten(text, width - 2)}"]
        told = []
        if worker.numa_node != node:
            told.append("memory not bound" if worker.numa_node is None else f"memory of NUMA node {worker.numa_node}")
        if worker.state != "READY":
            told.append(worker.state)
        return lines + [self._paint("yellow", f"  {shorten(', '.join(told), width - 2)}")] * bool(told)

    def _gpu(self, gpu: Gpu, width: int) -> str:
        on = [worker for worker in self._workers if worker.device == f"cuda:{gpu.index}"]
        symbol = self._paint(on[0].style, on[0].symbol) if on else self._paint("dim", _FREE)
        name = gpu.name.removeprefix("NVIDIA ")
        return f"{symbol} {shorten(f'GPU {gpu.index:<2} {size(gpu.memory_bytes):>9}  {gpu.bus_id}  {name}', width - 2)}"

    def rest(self) -> list[str]:
        """Boxes for NUMA nodes without CPUs, GPUs of unknown place, and workers that are not bound."""
        with_cpus = {cpu.node for cpu in self._topology.cpus if cpu.node is not None}
        bare = [f"NUMA node {node.id}, {_memory(node)}{self._nearest(node, with_cpus)}"
                for node in self._topology.nodes if node.id not in with_cpus]
        lines = _box(self._paint("bold", "no CPUs of their own"), bare, COLUMNS) if bare else []
        lost = [self._gpu(gpu, COLUMNS - 4) for gpu in self._topology.gpus if gpu.numa_node not in with_cpus]
        lines += _box(self._paint("bold", "GPUs on none of these nodes"), lost, COLUMNS) if lost else []
        unplaced = [f"{worker.name} ({worker.device}) {worker.state}" for worker in self._workers
                    if not set(worker.cpus) & set(self._cpu)]
        return lines + (_box(self._paint("bold", "workers not bound to these CPUs"), unplaced, COLUMNS)
                        if unplaced else [])

    def _nearest(self, node: NumaNode, with_cpus: Collection[int]) -> str:
        near = [(distance, other) for other, distance in node.distances if other in with_cpus]
        return f", nearest to node {min(near)[1]}" if near else ""

    def key(self, title: str) -> list[str]:
        shared = f", {_SHARED} several workers" if any(
            self._cell(cpu) == _SHARED for cpu in self._topology.cpus) else ""
        text = f"one sign a core: A-Z encoders, 0-9 prefill-decode, {_FREE} free{shared}; {title}"
        return [self._paint("dim", line) for line in textwrap.wrap(text, COLUMNS)]

    def tables(self) -> list[str]:
        """Distances between NUMA nodes and links between GPUs, if they are not all equal."""
        nodes, gpus = self._topology.nodes, self._topology.gpus
        lines = []
        if len({distance for node in nodes for _, distance in node.distances}) > 2:
            lines += _matrix("distance", [node.id for node in nodes],
                             lambda i, j: str(nodes[i].distance(nodes[j].id) or "-"))
        if any(gpu.links for gpu in gpus):
            links = {(gpu.index, link.gpu): link for gpu in gpus for link in gpu.links}
            lines += _matrix("GPU link", [gpu.index for gpu in gpus], lambda i, j: (
                _LINKS.get(link.kind, "?") + ("" if link.peer else "!")
                if (link := links.get((gpus[i].index, gpus[j].index))) else "-"))
            if not all(link.peer for link in links.values()):
                lines.append(self._paint("dim", "! no peer access"))
        return lines

    def notes(self) -> list[str]:
        found = self._topology
        facts = [f"torch computes with {', '.join(able)}"
                 for able in sorted({worker.abilities for worker in self._workers if worker.abilities})]
        if found.cpu_quota is not None:
            facts.append(f"CPU quota: the time of {found.cpu_quota:g} CPUs")
        if found.barred:
            facts.append(f"on but not ours: CPUs {ranges(found.barred)}")
        if found.offline:
            facts.append(f"switched off: CPUs {ranges(found.offline)}")
        facts += [f"huge pages: {pages.total} of {size(pages.page_bytes)}, {pages.free} free"
                  for pages in found.huge_pages]
        if found.transparent_huge_pages:
            facts.append(f"transparent huge pages: {found.transparent_huge_pages}")
        lines = ["", *textwrap.wrap("; ".join(facts), COLUMNS)] if facts else []
        for warning in found.warnings:
            first, *more = textwrap.wrap(warning, COLUMNS - 2)
            lines += [self._paint("yellow", "! ") + first, *(f"  {line}" for line in more)]
        return lines


def _memory(node: NumaNode) -> str:
    if node.memory_bytes == 0:
        return "no memory"
    if not node.memory_allowed:
        return "memory barred by a cpuset"
    return size(node.memory_bytes) if node.memory_bytes else "memory unknown"


def _matrix(title: str, ids: Sequence[int], cell: Callable[[int, int], str]) -> list[str]:
    rows = [[cell(i, j) for j in range(len(ids))] for i in range(len(ids))]
    width = max(len(text) for row in [*rows, [str(i) for i in ids]] for text in row) + 1
    if len(title) + len(ids) * width > COLUMNS:
        return []
    head = title + "".join(str(i).rjust(width) for i in ids)
    return ["", head, *(f"{i:>{len(title)}}" + "".join(text.rjust(width) for text in row)
                        for i, row in zip(ids, rows))]


def _box(title: str, lines: Iterable[str], width: int) -> list[str]:
    top = f"╭─ {title} {'─' * (width - 5 - _length(title))}╮"
    return [top, *(f"│ {line}{' ' * (width - 4 - _length(line))} │" for line in lines), f"╰{'─' * (width - 2)}╯"]


def _beside(boxes: Sequence[list[str]], width: int) -> list[str]:
    """Boxes next to each other, all as high as the highest."""
    height = max(map(len, boxes))
    stretched = [[*box[:-1], *[f"│{' ' * (width - 2)}│"] * (height - len(box)), box[-1]] for box in boxes]
    return [_GAP.join(parts) for parts in zip_longest(*stretched, fillvalue="")]


def _length(text: str) -> int:
    return len(_ESCAPES.sub("", text))
