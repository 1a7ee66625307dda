"""NVIDIA GPUs by NVML, and the NUMA node each hangs on.  Starts no CUDA context."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from epdd.hardware import sysfs
from epdd.hardware.topology import Gpu, NumaNode


def read(sysroot: Path, usable: Collection[int], nodes: Collection[NumaNode]) -> tuple[tuple[Gpu, ...], list[str]]:
    """The GPUs and warnings about those that cannot be used.  No driver library means no GPUs."""
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
    gpus, warnings = [], []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                if _visible(pynvml, index):
                    gpus.append(_gpu(pynvml, index, sysroot, usable, nodes))
            except pynvml.NVMLError as error:
                warnings.append(f"GPU {index} cannot be used: {error}")
    except pynvml.NVMLError as error:
        warnings.append(f"GPUs cannot be counted: {error}")
    finally:
        pynvml.nvmlShutdown()
    return tuple(gpus), warnings


def _visible(pynvml: Any, index: int) -> bool:
    """CUDA_VISIBLE_DEVICES, which NVML does not know, is how operators keep a GPU for something else."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return True
    names = [name.strip() for name in wanted.split(",")]
    if str(index) in names:
        return True
    prefixes = tuple(name for name in names if name.startswith("GPU-"))
    return bool(prefixes) and _string(pynvml.nvmlDeviceGetUUID(
        pynvml.nvmlDeviceGetHandleByIndex(index))).startswith(prefixes)


def _gpu(pynvml: Any, index: int, sysroot: Path, usable: Collection[int], nodes: Collection[NumaNode]) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    bus_id = _string(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]
    folder = sysroot / "sys/bus/pci/devices" / bus_id
    near = _affinity(pynvml, handle)
    if near is None:
        near = sysfs.numbers(folder / "local_cpulist") or set()
    near.intersection_update(usable)
    return Gpu(index=index, name=_string(pynvml.nvmlDeviceGetName(handle)),
               memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), bus_id=bus_id,
               numa_node=_node(folder, near, nodes), cpus=tuple(sorted(near)))


def _affinity(pynvml: Any, handle: Any) -> set[int] | None:
    words = -(-(os.cpu_count() or 1) // 64)
    try:
        masks = pynvml.nvmlDeviceGetCpuAffinity(handle, words)
    except pynvml.NVMLError:
        return None
    return {64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}


def _node(folder: Path, near: set[int], nodes: Collection[NumaNode]) -> int | None:
    """The firmware's word, or else the only NUMA node that has the GPU's near CPUs.

    Not nvmlDeviceGetNumaNodeId: that is the node a GPU's own memory forms.
    """
    told = sysfs.number(folder / "numa_node")
    if told is not None and told >= 0:
        return told
    having = [node.id for node in nodes if near and near <= set(node.cpus)]
    return having[0] if len(having) == 1 else None


def _string(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
