"""Recorded machines (../shared/topology, or EPDD_SHARED): /sys trees held in memory, and maps of GPUs."""

from __future__ import annotations

import os
import re
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from epdd.hardware import sysfs

SHARED = Path(os.environ.get("EPDD_SHARED") or Path(__file__).resolve().parents[3] / "shared")
ARCHIVES = SHARED / "topology"
# Only the files that the probe reads; the whole trees are a hundred times as large.
_WANTED = re.compile(
    r"(^|/)(proc/(cpuinfo|meminfo|mounts|self/(status|cgroup|cpuset))"
    r"|(cgroup|cpuset)/.*(cpus|mems|max|limit_in_bytes|quota_us|period_us)(\.effective)?"
    r"|sys/devices/cpu_\w+/cpus|sys/kernel/mm/.*(nr_hugepages|free_hugepages|enabled)"
    r"|sys/devices/system/cpu/(online|present|cpufreq/policy\d+/base_frequency|cpu\d+/(online|cpu_capacity"
    r"|topology/\w+|cache/index\d+/(level|type|size|shared_cpu_list|shared_cpu_map)))"
    r"|sys/devices/system/node/(\w+|node\d+/(cpulist|cpumap|meminfo|distance|hugepages/.*/(nr|free)_hugepages)))$")


class Files:
    """Replaces the two functions of sysfs that read the file system."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._names: dict[str, list[str]] = {}

    def add(self, path: str, content: str) -> None:
        if path not in self._texts:
            self._list(path)
        self._texts[path] = content.strip()

    def _list(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        if folder and folder not in self._names:
            self._list(folder)
        self._names.setdefault(folder, []).append(name)

    def text(self, path: Path) -> str | None:
        return self._texts.get(str(path))

    def names(self, path: Path) -> list[str]:
        return self._names.get(str(path), [])


def archive(name: str, keys: Iterable[str]) -> dict[str, tuple[Path, Files]]:
    """Root and files of each machine in one archive, by its key in expected.json."""
    path = next(path for path in ARCHIVES.iterdir() if path.name.startswith(f"{name}.t") and ".tar" in path.name)
    files = Files()
    with tarfile.open(path) as tar:
        for member in tar:
            if _WANTED.search(member.name) and member.isfile():
                stream = tar.extractfile(member)
                assert stream is not None
                files.add(f"/recorded/{member.name.removeprefix('./')}", stream.read().decode(errors="replace"))
    return {key: (Path("/recorded", key.partition("/")[2]), files) for key in keys}


@dataclass
class GpuMap:
    """Which GPU hangs on which NUMA node, and the CPUs of the nodes."""

    node_of: dict[str, int] = field(default_factory=dict)           # by bus id
    masks: dict[int, str] = field(default_factory=dict)             # hexadecimal; empty where the file has none

    def cpus(self, node: int) -> set[int]:
        bits = int(self.masks[node], 16)
        return {i for i in range(bits.bit_length()) if bits >> i & 1}


def gpu_map(path: Path) -> GpuMap:
    """From the XML of NCCL or RCCL, or of hwloc."""
    root = ElementTree.parse(path).getroot()
    found = GpuMap()
    if root.tag == "topology":
        for package in root.iter("object"):
            if package.get("type") != "Package":
                continue
            numa = next(item for item in package.iter("object") if item.get("type") == "NUMANode")
            node = int(numa.attrib["os_index"])
            found.masks[node] = numa.attrib["cpuset"].removeprefix("0x").replace(",0x", "")
            found.node_of |= {item.attrib["pci_busid"]: node for item in package.iter("object")
                              if item.get("pci_type", "").startswith("0302")}
        return found
    for cpu in root.iter("cpu"):
        node = int(cpu.attrib["numaid"])
        found.masks[node] = cpu.get("affinity", "").replace(",", "")
        # One file (AWS g5) lists bare devices without a class.
        found.node_of |= {pci.attrib["busid"]: node for pci in cpu.iter("pci")
                          if pci.get("class", "0x03").startswith("0x03") or pci.find("gpu") is not None}
    return found


def use(patch: pytest.MonkeyPatch, files: Files) -> None:
    """Let the probe read `files`."""
    patch.setattr(sysfs, "text", files.text)
    patch.setattr(sysfs, "names", files.names)
