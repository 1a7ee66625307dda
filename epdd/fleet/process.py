"""Worker processes: forked from a warmed fork server, watched by pidfd, ended by terminate then kill.

The only file that uses multiprocess.  Nothing but the spawn message is pickled.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import time
from importlib import import_module
from typing import Any

import multiprocess
from multiprocess import forkserver, reduction
from multiprocess import process as processes

from epdd.emulation import Emulation
from epdd.wire import WorkerSpec

STOP_TIMEOUT_S = 5.0        # from terminate to kill
STATE, FLAGS, MAJOR_FAULTS, USER_TICKS, SYSTEM_TICKS = 0, 6, 9, 11, 12     # indices of `_stat`
PF_EXITING = 4              # a bit of FLAGS
KILL_WAIT_S = 1.0           # a killed process exits within milliseconds unless a driver blocks it


class _Descriptor:
    """An open file handed to the child with the spawn message (SCM_RIGHTS); there it is a DupFd."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        duplicate = reduction.DupFd(self._fd)
        return type(duplicate), (duplicate.ind,)


class ForkServer:
    """A process that has imported torch and the model code once; each worker is a fork of it."""

    def __init__(self, preload: list[str], target: str = "epdd.worker.bootstrap") -> None:
        """`preload` and `target` are module names: the daemon imports torch for neither."""
        self._target = target
        self._context = multiprocess.get_context("forkserver")
        self._context.set_forkserver_preload(preload)

    async def spawn(self, spec: WorkerSpec, worker_end: socket.socket, arena_fd: int) -> "Process":
        """Fork a worker; waits for the fork server's imports.  Raises OSError."""
        target = import_module(self._target).main
        process = self._context.Process(target=target, name=spec.name, daemon=True,
                                        args=(spec, _Descriptor(worker_end.fileno()), _Descriptor(arena_fd)))
        # start() blocks until the fork server answers: seconds for the first worker.
        await asyncio.get_running_loop().run_in_executor(None, _start, process)
        # Off multiprocess's list: the next start, in another thread, would read exit codes of the processes there,
        # and an exit code can be read only once.
        processes._children.discard(process)
        return Process(process)

    @property
    def pid(self) -> int | None:
        """None: no fork server runs."""
        # multiprocess has no public name for it.
        return getattr(forkserver._forkserver, "_forkserver_pid", None)

    def stop(self) -> None:
        """End the fork server, even during its imports; its children live on, and the next spawn starts another."""
        # By signal: any other way would wait until torch is imported.
        pid = self.pid
        if pid is None:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        # While it exists, multiprocess would send it the next spawn.
        gone = select.poll()
        gone.register(pidfd, select.POLLIN)
        gone.poll(KILL_WAIT_S * 1000)
        os.close(pidfd)


def _start(process: Any) -> None:
    """Start a process, in a thread of the executor."""
    # Children inherit the mask, over fork and exec.  The daemon's main thread handles the signals of a closed terminal
    # or of `systemctl kill`.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    process.start()


def preload_modules(model_type: str, emulation: Emulation | None = None) -> list[str]:
    """Modules that the fork server imports once, by name: the daemon itself imports none of them."""
    if emulation is not None and not emulation.needs_torch:
        return ["epdd.worker.emulated.encoder", "epdd.worker.emulated.prefill_decode", "epdd.worker.process.affinity"]
    return ["epdd.worker.preload", f"transformers.models.{model_type}.modeling_{model_type}"]


class Process:
    """One worker process.  It is the fork server's child, so its end is seen through a pidfd."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid
        self.killed_at: float | None = None     # time.monotonic()
        try:
            self._pidfd: int | None = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._pidfd = None      # gone before it could be watched

    async def wait(self) -> int:
        """The exit code once the process is gone (negative: the signal that ended it)."""
        loop = asyncio.get_running_loop()
        if self._pidfd is not None:
            gone: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._pidfd, _resolve, gone)
            try:
                await gone
            finally:
                loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        # The pidfd can fire before the fork server has reaped the child and passed on its code.
        await loop.run_in_executor(None, self._process.join, 5.0)
        code = self._process.exitcode
        if code is not None:
            self._process.close()
        return 255 if code is None else int(code)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal unless the process is gone; never reaches another process with the same pid."""
        if self._pidfd is not None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.killed_at = self.killed_at or time.monotonic()
        self.signal(signal.SIGKILL)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def progress_counters(pid: int) -> tuple[int, int] | None:
    """(CPU ticks, major page faults) of all threads of a process so far.

    None while one of them runs or waits for a CPU, and when the process is gone.  If the numbers stay the same, the
    process makes no progress: it is stopped, or blocked in a system call.
    """
    try:
        states = [_stat(f"/proc/{pid}/task/{thread}")[STATE] for thread in os.listdir(f"/proc/{pid}/task")]
        fields = _stat(f"/proc/{pid}")
        done = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS]), int(fields[MAJOR_FAULTS])
    except (OSError, IndexError, ValueError):
        return None
    return None if "R" in states else done


def _stat(folder: str) -> list[str]:
    """The fields of a process's or thread's `stat` from the third on (proc(5))."""
    with open(f"{folder}/stat") as file:
        return file.read().rpartition(")")[2].split()       # the name before may hold anything


def leaving(pid: int) -> bool:
    """Whether a process has begun to exit, or is gone.

    The kernel sets the flag before it frees the process's memory, on GPUs too; the pidfd becomes readable after that.
    """
    try:
        fields = _stat(f"/proc/{pid}")
        return bool(int(fields[FLAGS]) & PF_EXITING) or fields[STATE] in "ZX"
    except (OSError, IndexError, ValueError):
        return True


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
