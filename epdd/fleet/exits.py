"""How a worker's process ended, in words a person can act on, and whether its GPU is still there."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from epdd.errors import DeviceError
from epdd.hardware import cgroup, gpus
from epdd.wire import WorkerSpec


class OomKills:
    """The kernel's counts of the processes that it killed for memory, by control group."""

    def __init__(self, sysroot: Path = Path("/")) -> None:
        self._sysroot = sysroot
        self._seen: dict[Path, int] = {}

    def watch(self, pid: int) -> Path | None:
        """The count that the process's death for memory would go into; earlier deaths do not matter any more."""
        count = cgroup.oom_kills_file(self._sysroot, pid)
        if count is not None:
            self._seen[count] = cgroup.oom_kills(count) or 0
        return count

    def took(self, count: Path | None) -> bool:
        """Whether the kernel has killed one more there since this was last asked."""
        if count is None or (cgroup.oom_kills(count) or 0) <= self._seen.get(count, 0):
            return False
        self._seen[count] += 1
        return True


def describe(code: int, out_of_memory: bool = False) -> str:
    """An exit code; negative ones are signals."""
    if code == -signal.SIGKILL and out_of_memory:
        return "killed by signal 9: out of memory, by the kernel, for the limit of its control group"
    if code == -signal.SIGKILL:
        return "killed by signal 9 (by an operator, the stall watch or the kernel's OOM killer)"
    if code == -signal.SIGBUS:
        return "ended by SIGBUS: a file that it maps, of the weights most likely, was cut while in use"
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"ended by {names.get(-code, f'signal {-code}')}"    # real-time signals have no name
    if code == DeviceError.exit_code:
        return f"exit code {code}: its GPU failed"
    return f"exit code {code}"


async def gpu_lost(spec: WorkerSpec) -> str:
    """Why no process can run on the worker's GPU any more; empty: one can, or it has none.

    To be asked after a death, whatever the exit code says: who is killed in the middle of a call tells nothing.
    """
    if spec.device == "cpu" or spec.emulated is not None:
        return ""
    # In a thread: a driver in trouble takes its time.
    found = await asyncio.get_running_loop().run_in_executor(None, gpus.lost, int(spec.device.partition(":")[2]))
    return f"{spec.device.replace('cuda:', 'GPU ')} is lost ({found})" if found else ""
