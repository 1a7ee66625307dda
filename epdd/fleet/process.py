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

KILLED_BY_US_S = 5.0        # a worker that ignores terminate for so long is killed
STATE, FLAGS, MAJOR_FAULTS, USER_TICKS, SYSTEM_TICKS = 0, 6, 9, 11, 12     # of /proc/PID/stat, by `_stat`
PF_EXITING = 4              # in the flags
KILL_WAIT_S = 1.0           # for the kernel to end what was killed: milliseconds unless a device holds it


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
        """Fork a worker.  Waits until the fork server has its imports done; raises OSError."""
        target = import_module(self._target).main
        process = self._context.Process(target=target, name=spec.name, daemon=True,
                                        args=(spec, _Descriptor(worker_end.fileno()), _Descriptor(arena_fd)))
        # start() blocks until the fork server answers, which at the first time is seconds.
        await asyncio.get_running_loop().run_in_executor(None, _start, process)
        # Off multiprocess's list: the next start, in another thread, would look for an exit code there too,
        # and only one of two readers gets it.
        processes._children.discard(process)
        return Process(process)

    @property
    def pid(self) -> int | None:
        """None: none runs."""
        # multiprocess has no public way.
        return getattr(forkserver._forkserver, "_forkserver_pid", None)

    def stop(self) -> None:
        """End the fork server, also in the middle of its imports; its children are not touched.

        The next spawn starts another.
        """
        # By signal: any other way would wait for torch to be loaded.
        pid = self.pid
        if pid is None:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        # Until it is gone multiprocess would send it the next spawn.
        gone = select.poll()
        gone.register(pidfd, select.POLLIN)
        gone.poll(KILL_WAIT_S * 1000)
        os.close(pidfd)


def _start(process: Any) -> None:
    """Start it, in a thread of the executor."""
    # Blocked here they are blocked in what this thread starts, over fork and exec.  A closed terminal, or a signal to
    # all processes of the service (`systemctl kill`), is for the daemon, whose main thread takes it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    process.start()


def preload_modules(model_type: str, emulation: Emulation | None = None) -> list[str]:
    """What the fork server imports once, by name: the daemon itself imports none of it."""
    if emulation is not None and not emulation.needs_torch:
        return ["epdd.worker.emulated.encoder", "epdd.worker.emulated.prefill_decode", "epdd.worker.process.affinity"]
    return ["epdd.worker.preload", f"transformers.models.{model_type}.modeling_{model_type}"]


class Process:
    """One worker process.  It is the fork server's child, so its end is seen through a pidfd."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid
        self.killed_at: float | None = None     # of the monotonic clock
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
        """Send a signal unless the process is gone; never reaches a process that took over its pid."""
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


def effort(pid: int) -> tuple[int, int] | None:
    """What the kernel has seen all threads of a process do so far: (ticks of CPU, pages that a disk had to bring).

    None while one of them runs or waits for a CPU, and when the process is gone.  A process whose numbers stay the
    same stands still: it is stopped, or waits inside a system call for something that does not come.
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
    """Whether a process has begun to end, or is gone.

    The kernel sets the flag before it takes anything from the process, GPU memory too; the pidfd tells only after that.
    """
    try:
        fields = _stat(f"/proc/{pid}")
        return bool(int(fields[FLAGS]) & PF_EXITING) or fields[STATE] in "ZX"
    except (OSError, IndexError, ValueError):
        return True


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process, or None if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
