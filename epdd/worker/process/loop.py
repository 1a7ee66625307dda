"""The working loop of every worker: drain the socket, do one step, reply, send heartbeats.

Knows frames and roles, no models.  Heartbeats come from this loop itself, so a stuck worker sends none.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable
from typing import Protocol

from epdd import wire
from epdd.errors import DeviceError, EpddError, OutOfMemory, ProtocolError

log = logging.getLogger(__name__)

Send = Callable[[wire.FromWorker], None]

READ_BYTES = 1 << 18
# With more unread answers than this the worker does no further step until the daemon reads.
OUT_BYTES_MAX = 8 << 20
INTERNAL = "the worker failed on this request"
NO_MEMORY = "can't allocate memory"     # torch's message on CPUs, where it has no class for it


class Role(Protocol):
    """What the loop runs: an encoder or a prefill-decode engine."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""

    def submit(self, message: wire.ToWorker, raw: bytes) -> None:
        """Take work.  Raises ProtocolError on what this role never does."""

    def cancel(self, work_id: str) -> None:
        """End work and answer Cancelled; unknown ids are ignored."""

    def step(self) -> None:
        """One bounded piece of work; answers through the Send it was made with."""

    def heartbeat(self) -> wire.Heartbeat:
        """The counters of now."""


class DaemonConnection:
    """The worker's end of the socket: whole frames in, buffered frames out, never blocking."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._frames = wire.FrameBuffer(wire.to_worker)
        self._in = memoryview(bytearray(READ_BYTES))
        self._out = bytearray()

    @property
    def congested(self) -> bool:
        return len(self._out) > OUT_BYTES_MAX

    def send(self, message: wire.FromWorker) -> None:
        """Queue a message; `flush` sends it."""
        self._out += wire.pack(message)

    def flush(self) -> None:
        """Give the kernel what it takes now."""
        while self._out:
            try:
                sent = self._socket.send(self._out)
            except BlockingIOError:
                return
            del self._out[:sent]

    def drain(self, timeout_s: float) -> None:
        """Send everything, waiting at most `timeout_s`: for the last message before an exit."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(self._out)
        except OSError:
            log.debug("the daemon is gone")
        self._out.clear()

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to read, room to write what is queued, or after the timeout."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
        poll.poll(timeout_s * 1000)

    def receive(self) -> list[tuple[wire.ToWorker, bytes]]:
        """All frames that have arrived.  Raises ProtocolError, and EOFError when the daemon has hung up."""
        frames: list[tuple[wire.ToWorker, bytes]] = []
        count = READ_BYTES
        while count == READ_BYTES:      # less was all there is
            try:
                count = self._socket.recv_into(self._in)
            except BlockingIOError:
                return frames
            if not count:
                raise EOFError
            frames += self._frames.feed(self._in[:count])
        return frames


def run(connection: DaemonConnection, role: Role, heartbeat_s: float) -> None:
    """Serve until the daemon hangs up.  Raises ProtocolError, after which the worker must be replaced."""
    next_heartbeat = time.monotonic()
    while True:
        try:
            frames = connection.receive()
        except (EOFError, ConnectionError):
            return
        for message, raw in frames:
            if isinstance(message, wire.Cancel):
                role.cancel(message.id)
            else:
                role.submit(message, raw)
        if role.busy and not connection.congested:
            role.step()
        now = time.monotonic()
        if now >= next_heartbeat:
            connection.send(role.heartbeat())
            next_heartbeat = now + heartbeat_s
        try:
            connection.flush()
        except ConnectionError:
            return
        if connection.congested or not role.busy:
            connection.wait(max(0.0, next_heartbeat - time.monotonic()))


def failed(work_id: str, error: Exception) -> wire.Failed:
    """The answer for a failed item: our own errors with their message, others with a fixed text, and a log line.

    Raises ProtocolError and DeviceError again: they end the worker.
    """
    if isinstance(error, (ProtocolError, DeviceError)):
        raise error
    if isinstance(error, MemoryError) or NO_MEMORY in str(error):
        error = OutOfMemory("there is no memory for this")
    if isinstance(error, EpddError):
        return wire.Failed(work_id, error.code, error.message)
    log.error("request %s failed", work_id, exc_info=error)
    return wire.Failed(work_id, EpddError.code, INTERNAL)
