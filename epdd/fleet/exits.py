"""Why a worker's process ended, as text, and whether its GPU still works."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from epdd.errors import DeviceError
from epdd.hardware import cgroup, gpus
from epdd.wire import WorkerSpec


class OomKills:
    """The kernel's counts of out-of-memory kills, by control group."""

    def __init__(self, sysroot: Path = Path("/")) -> None:
        self._sysroot = sysroot
        self._seen: dict[Path, int] = {}

    def watch(self, pid: int) -> Path | None:
        """The file that counts out-of-memory kills in the process's group; earlier kills are not counted."""
        count = cgroup.oom_kills_file(self._sysroot, pid)
        if count is not None:
            self._seen[count] = cgroup.oom_kills(count) or 0
        return count

    def killed_one(self, count: Path | None) -> bool:
        """Whether the kernel has killed one more process there since the last call."""
        if count is None or (cgroup.oom_kills(count) or 0) <= self._seen.get(count, 0):
            return False
        self._seen[count] += 1
        return True


def describe(code: int, out_of_memory: bool = False) -> str:
    """An exit code as text; negative codes are signals."""
    if code == -signal.SIGKILL and out_of_memory:
        return "killed by signal 9: out of memory, the limit of its control group (by the kernel's OOM killer)"
    if code == -signal.SIGKILL:
        return "killed by signal 9 (by an operator, the stall detector or the kernel's OOM killer)"
    if code == -signal.SIGBUS:
        return "ended by SIGBUS: a file that it maps, most likely weights, was truncated while in use"
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"ended by {names.get(-code, f'signal {-code}')}"    # real-time signals have no name
    if code == DeviceError.exit_code:
        return f"exit code {code}: its GPU failed"
    return f"exit code {code}"


async def gpu_lost(spec: WorkerSpec) -> str:
    """Why no process can run on the worker's GPU any more; empty if one can, or if the worker has no GPU.

    Ask after every exit, whatever its code: a process that is killed inside a CUDA call reports nothing.
    """
    if spec.device == "cpu" or spec.emulated is not None:
        return ""
    # In a thread: a failing driver may answer slowly.
    found = await asyncio.get_running_loop().run_in_executor(None, gpus.lost, int(spec.device.partition(":")[2]))
    return f"{spec.device.replace('cuda:', 'GPU ')} is lost ({found})" if found else ""
