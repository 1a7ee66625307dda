"""Reads NVIDIA GPUs by NVML: memory, NUMA node, links between them.  Starts no CUDA context."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from epdd.hardware import sysfs
from epdd.hardware.topology import Gpu, Link, NumaNode

# NVML's numbers, written out: pynvml has no stable names for them (its NVML_P2P_CAPS_INDEX_READ is a tuple).
_BETWEEN = {0: "same board", 10: "PCI switch", 20: "PCI switches", 30: "host bridge", 40: "NUMA node", 50: "sockets"}
_PEER_READ, _PEER_NVLINK, _PEER_OK = 0, 2, 0


def read(sysroot: Path, usable: Collection[int], nodes: Collection[NumaNode]) -> tuple[tuple[Gpu, ...], list[str]]:
    """The GPUs, and warnings about those that cannot be used.  Without a driver library there are none."""
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return (), []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return (), []
    except pynvml.NVMLError as error:
        return (), [f"GPUs cannot be used: {error}"]
    try:
        return _read(pynvml, sysroot, usable, nodes)
    finally:
        pynvml.nvmlShutdown()


def lost(index: int) -> str:
    """The driver's error for a GPU that was there; empty if it can be used, or if there is no driver."""
    try:
        import pynvml
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return ""
    except pynvml.NVMLError as error:
        return str(error)
    try:
        pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index))
    except pynvml.NVMLError as error:
        return str(error)
    finally:
        pynvml.nvmlShutdown()
    return ""


def _read(pynvml: Any, sysroot: Path, usable: Collection[int],
          nodes: Collection[NumaNode]) -> tuple[tuple[Gpu, ...], list[str]]:
    gpus: dict[int, Gpu] = {}
    handles: dict[int, Any] = {}
    warnings = []
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return (), [f"GPUs cannot be counted: {error}"]
    for index in range(count):
        try:
            if not _visible(pynvml, index):
                continue
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if _partitioned(pynvml, handle):
                warnings.append(f"GPU {index} cannot be used: MIG is on, and a worker takes a whole GPU; "
                                f"nvidia-smi -i {index} -mig 0 switches it off")
                continue
            gpus[index] = _gpu(pynvml, index, handle, sysroot, usable, nodes)
            handles[index] = handle
        except pynvml.NVMLError as error:
            warnings.append(f"GPU {index} cannot be used: {error}")
    links = {index: _links(pynvml, index, handles) for index in handles}
    for index, handle in handles.items():
        try:
            pynvml.nvmlDeviceGetMemoryInfo(handle)      # an error in `_links` does not say which GPU was lost
        except pynvml.NVMLError as error:
            warnings.append(f"GPU {index} cannot be used: {error}")
            del gpus[index]
    return tuple(replace(gpu, links=tuple(link for link in links[index] if link.gpu in gpus))
                 for index, gpu in gpus.items()), warnings


def _visible(pynvml: Any, index: int) -> bool:
    """Whether CUDA_VISIBLE_DEVICES, which NVML does not know, allows this GPU."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return True
    names = [name.strip() for name in wanted.split(",")]
    if str(index) in names:
        return True
    prefixes = tuple(name for name in names if name.startswith("GPU-"))
    return bool(prefixes) and _string(pynvml.nvmlDeviceGetUUID(
        pynvml.nvmlDeviceGetHandleByIndex(index))).startswith(prefixes)


def _partitioned(pynvml: Any, handle: Any) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return False            # GPUs without MIG, and drivers older than it


def _gpu(pynvml: Any, index: int, handle: Any, sysroot: Path, usable: Collection[int],
         nodes: Collection[NumaNode]) -> Gpu:
    bus_id = _string(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]
    folder = sysroot / "sys/bus/pci/devices" / bus_id
    near = _affinity(pynvml, handle, usable)
    if near is None:
        near = sysfs.numbers(folder / "local_cpulist") or set()
    near.intersection_update(usable)
    return Gpu(index=index, name=_string(pynvml.nvmlDeviceGetName(handle)),
               memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), bus_id=bus_id,
               numa_node=_node(folder, near, nodes), cpus=tuple(sorted(near)))


def _affinity(pynvml: Any, handle: Any, usable: Collection[int]) -> set[int] | None:
    words = max(usable, default=0) // 64 + 1         # CPU numbers can be sparse
    try:
        masks = pynvml.nvmlDeviceGetCpuAffinity(handle, words)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None
    return {64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}


def _node(folder: Path, near: set[int], nodes: Collection[NumaNode]) -> int | None:
    """The NUMA node by the firmware, or else the only one that has the GPU's near CPUs.

    Not nvmlDeviceGetNumaNodeId, which is the node that a GPU's own memory forms.
    """
    told = sysfs.number(folder / "numa_node")
    if told is not None and told >= 0:
        return told
    having = [node.id for node in nodes if near and near <= set(node.cpus)]
    return having[0] if len(having) == 1 else None


def _links(pynvml: Any, index: int, handles: Mapping[int, Any]) -> list[Link]:
    """Links from one GPU to the others; those for which the driver reports an error are left out."""
    links = []
    for other, handle in handles.items():
        if other == index:
            continue
        try:
            kind = _BETWEEN.get(pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[index], handle), "unknown")
            peer = pynvml.nvmlDeviceGetP2PStatus(handles[index], handle, _PEER_READ) == _PEER_OK
            if pynvml.nvmlDeviceGetP2PStatus(handles[index], handle, _PEER_NVLINK) == _PEER_OK:
                kind = "NVLink"
        except pynvml.NVMLError:
            continue
        links.append(Link(other, kind, peer))
    return links


def _string(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
