"""A worker's first steps: bind, load, report Ready, then run the loop.

Runs in a fork of the warmed fork server.  Imports no torch itself: the daemon imports this file to name
`main`, and the role is imported by string in the child.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, Protocol

import msgspec

from epdd import log as logs, wire
from epdd.errors import DeviceError, EpddError, StartupError
from epdd.checkpoint import identity
from epdd.worker.process import readahead
from epdd.worker.process.thread_name import name_thread

log = logging.getLogger(__name__)

ROLES = {("encoder", "cpu"): "epdd.worker.vision.encoder:Encoder",
         ("encoder", "gpu"): "epdd.worker.gpu.encoder:GpuEncoder",
         ("encoder", "emulated"): "epdd.worker.emulated.encoder:EmulatedEncoder",
         ("pd", "emulated"): "epdd.worker.emulated.prefill_decode:EmulatedPrefillDecode"}
# Any other prefill-decode worker is the engine with its device's model runner.
ENGINE = "epdd.worker.language.engine:Engine"
RUNNERS = {"cpu": "epdd.worker.language.cpu_runner:CpuModelRunner", "gpu": "epdd.worker.gpu.runner:GpuModelRunner"}
LAST_WORDS_S = 2.0      # for a Failed to reach the daemon before the exit
OTHERS_S = 0.1          # between two looks whether the other encoders have reserved their slices


class Descriptor(Protocol):
    """A file descriptor that came with the spawn message (multiprocess.reduction.DupFd)."""

    def detach(self) -> int:
        """The descriptor, now this process's own."""


def main(spec: wire.WorkerSpec, sock: Descriptor, arena: Descriptor | None) -> None:
    """Run the worker `spec` until the daemon hangs up.

    Exits with 78 on a StartupError (a restart would not help), with 79 when its GPU failed, with 1 on any other fault.
    """
    begin = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # the terminal's Ctrl-C is the daemon's to handle
    name_thread(f"epdd {spec.name}")
    logs.setup(spec.log_level)
    # Invariant: bound before the first thread and torch operation, for both inherit the binding.
    binding = importlib.import_module("epdd.worker.process.affinity").bind(spec)
    spec = replace(spec, threads=binding.threads)
    fd = sock.detach()
    leaving = threading.Event()
    threading.Thread(target=_exit_with_daemon, args=(os.dup(fd), leaving), daemon=True).start()
    loop = importlib.import_module("epdd.worker.process.loop")
    connection = loop.DaemonConnection(fd)
    try:
        role, ready = _start(spec, arena, connection)
        # The number of threads as torch reports it in the role's Ready.
        binding = msgspec.structs.replace(binding, threads=ready.binding.threads)
        abilities = (("emulated",) if spec.emulated
                     else importlib.import_module("epdd.worker.weights.load").abilities(spec.device))
        connection.send(msgspec.structs.replace(ready, binding=binding, abilities=abilities,
                                                seconds=time.monotonic() - begin))
        log.debug("%s ready seconds=%.1f dtype=%s parameters=%d", spec.name, time.monotonic() - begin,
                  ready.dtype, ready.parameters)
        loop.run(connection, role, spec.heartbeat_s)
    except ConnectionError:
        return      # the daemon is gone
    except Exception as error:
        leaving.set()
        if spec.device != "cpu" and spec.emulated is None:
            error = importlib.import_module("epdd.worker.kernels.cuda").fault(error) or error
        _last_words(spec, connection, error)
        sys.exit(error.exit_code if isinstance(error, (StartupError, DeviceError)) else 1)
    finally:
        logs.output().close()       # a fork ends without atexit


def _start(spec: wire.WorkerSpec, arena: Descriptor | None, connection: Any) -> tuple[Any, wire.Ready]:
    """Map, load and warm up, and report progress.  Raises StartupError."""

    def report(stage: str, done: float) -> None:
        connection.send(wire.Loading(stage, done))
        connection.flush()

    report("import", 0.0)
    if spec.emulated is None or spec.emulated.answers == "demo":
        _set_up_torch(spec.threads)
    make_role = role_of(spec)
    report("arena", 0.0)
    mapping = _map_arena(spec, arena, lambda done: report("arena", done))
    huge_bytes = 0
    if mapping is not None:
        huge_bytes = mapping.huge_bytes     # before it maps what is not its slice
        threading.Thread(target=_map_others_slices, args=(mapping,), daemon=True).start()
    report("weights", 0.0)
    identity.check(spec.model, spec.weights)
    # An emulated role waits on the socket while its time passes.
    waiting = (connection.wait,) if spec.emulated else ()
    loads = spec.emulated is None or spec.emulated.answers == "demo"
    with readahead.read_ahead(spec.model, spec.role, lambda done: report("weights", done)) if loads else nullcontext():
        role = make_role(spec, mapping, connection.send, *waiting)
    identity.check(spec.model, spec.weights)         # they may have been changed while they were read
    report("warm-up", 0.0)
    ready = role.warm_up(lambda done: report("warm-up", done))
    ctypes.CDLL(None).malloc_trim(0)    # loading and trials took more than serving will
    return role, msgspec.structs.replace(ready, arena_huge_bytes=huge_bytes)


def role_of(spec: wire.WorkerSpec) -> Callable[..., Any]:
    """What makes the worker's role of (spec, arena, send), an emulated one of (spec, arena, send, wait)."""
    device = "emulated" if spec.emulated else "cpu" if spec.device == "cpu" else "gpu"
    if (spec.role, device) in ROLES:
        return resolve_name(ROLES[spec.role, device])  # type: ignore[no-any-return]
    engine, runner = resolve_name(ENGINE), resolve_name(RUNNERS[device])
    return lambda spec, arena, send: engine(spec, runner(spec, arena, send), send)


def _set_up_torch(threads: int) -> None:
    torch = importlib.import_module("torch")
    torch.set_num_threads(threads)
    importlib.import_module("epdd.worker.kernels.mkl").warm_up_vml()
    torch.set_num_interop_threads(1)


def _map_arena(spec: wire.WorkerSpec, arena: Descriptor | None, progress: Callable[[float], None]) -> Any:
    if arena is None:
        return None
    mapping = importlib.import_module("epdd.arena").Mapping(arena.detach(), spec.arena_bytes, spec.huge_pages)
    mapping.reserve(*spec.arena_slice, progress)
    return mapping


def _map_others_slices(mapping: Any) -> None:
    """Map all of the arena in this process, each slice as soon as its encoder has reserved it."""
    name_thread("arena")
    while not mapping.populate():
        time.sleep(OTHERS_S)


def _last_words(spec: wire.WorkerSpec, connection: Any, error: Exception) -> None:
    """Log, and tell the daemon, why this worker ends."""
    if isinstance(error, (StartupError, DeviceError)):
        log.error("%s ends: %s", spec.name, error.message)
    else:
        log.error("%s failed", spec.name, exc_info=error)
    code, text = (error.code, error.message) if isinstance(error, EpddError) else (
        EpddError.code, f"{type(error).__name__}: {error}")
    connection.send(wire.Failed("", code, text))
    connection.drain(LAST_WORDS_S)


def _exit_with_daemon(fd: int, leaving: threading.Event) -> None:
    """End the process as soon as the daemon's end is closed, also in the middle of a long kernel."""
    name_thread("hang-up")
    poll = select.poll()
    poll.register(fd, select.POLLHUP | select.POLLRDHUP)
    while not poll.poll():
        pass
    if not leaving.is_set():    # after the last message the daemon may hang up before the exit code is set
        os._exit(0)
