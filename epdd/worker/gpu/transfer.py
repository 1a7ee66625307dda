"""Rows between leases and this process's GPU, and the memory that leases lie in.

Leases lie in the host's arena, which is pinned here in portions, or in the pool of an encoder's GPU: its own, or one
that a prefill-decode worker has opened.  Either way a copy is by address, on a stream.

Why a reader sees what the writer wrote: an encoder answers only when its stream is done, and the answer comes to the
reader by the daemon.  A reader releases a lease only when its copies have arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from epdd import wire
from epdd.arena import Mapping
from epdd.errors import WorkerFailed
from epdd.worker.kernels.cuda import Device
from epdd.worker.process.loop import Send

log = logging.getLogger(__name__)

# Pinned at once, between two steps: it takes some tens of milliseconds.  A copy must lie in memory that was pinned in
# one call, or in none, so no copy crosses a multiple of this.
PORTION_BYTES = 256 << 20
HOST = 0


@dataclass(frozen=True)
class Fetched:
    """Rows on their way to the device."""

    planes: torch.Tensor        # [planes, rows, hidden]; to be read after `arrived`
    arrived: Any                # event


class Transfer:
    """The arenas that this worker can use, and copies from and to them."""

    def __init__(self, device: Device, host: Mapping | None) -> None:
        self._device = device
        self.stream = device.stream()
        self._arenas: dict[int, tuple[int, int]] = {}       # address, bytes
        self._own: tuple[int, int] | None = None
        self._unpinned: Iterator[tuple[int, int]] | None = None
        if host is not None:
            # Invariant: the mapping lives as long as the process.
            base = np.frombuffer(host.view(wire.Lease(0, host.size)), np.uint8).ctypes.data
            self._arenas[HOST] = base, host.size

    # --- arenas

    def create_pool(self, size: int) -> wire.GpuPool | None:
        """Memory on this GPU that other workers can open; all leases outside the host's arena lie in it.

        None, with a warning, if the machine allows none.
        """
        try:
            address = self._device.allocate(size)
            self._own = address, size
            return wire.GpuPool(self._device.export(address).hex(), size)
        except WorkerFailed as error:
            log.warning("embeddings go by the host's memory: %s", error.message)
            return None

    def handle(self, message: wire.OpenArena | wire.CloseArena) -> wire.Opened | None:
        """Open or close an arena; the answer, if there is one now."""
        if isinstance(message, wire.CloseArena):
            self._close(message.arena)
            return None
        if message.pool is None:
            self._unpinned = iter(_cut(*self._arenas[HOST])) if HOST in self._arenas else iter(())
            return None     # `idle` answers when all is pinned
        try:
            self._arenas[message.arena] = self._device.open(bytes.fromhex(message.pool.handle)), message.pool.bytes
        except (WorkerFailed, ValueError) as error:
            return wire.Opened(message.arena, str(error))
        return wire.Opened(message.arena)

    def idle(self) -> wire.Opened | None:
        """Pin the next portion of the host's arena, if any is left; the answer when all is pinned."""
        if self._unpinned is None:
            return None
        portion = next(self._unpinned, None)
        if portion is not None:
            try:
                self._device.register(*portion)
                return None
            except WorkerFailed as error:
                log.warning("the arena is not pinned, copies are slower: %s", error.message)
                self._unpinned = None
                return wire.Opened(HOST, error.message)
        self._unpinned = None
        return wire.Opened(HOST)

    @property
    def pinning(self) -> bool:
        """`idle` has something to do."""
        return self._unpinned is not None

    def take(self, message: wire.ToWorker, send: Send) -> bool:
        """Whether a message is about arenas; if so it is handled and answered."""
        if not isinstance(message, (wire.OpenArena, wire.CloseArena)):
            return False
        if (opened := self.handle(message)) is not None:
            send(opened)
        return True

    def go_on(self, send: Send) -> None:
        """`idle`, and its answer sent."""
        if (opened := self.idle()) is not None:
            send(opened)

    def _close(self, arena: int) -> None:
        address, _ = self._arenas.pop(arena, (0, 0))
        if not address:
            return
        self._device.synchronise(self.stream)       # nothing may read it any more
        try:
            self._device.close(address)
        except WorkerFailed as error:
            log.warning("arena %s is gone, and not closed: %s", arena, error.message)

    # --- copies

    def check(self, lease: wire.Lease) -> None:
        """Raises WorkerFailed if this worker cannot use the lease."""
        self._address(lease)

    def fetch(self, lease: wire.Lease, shape: tuple[int, int, int], dtype: torch.dtype, low: int,
              high: int) -> Fetched:
        """Begin to copy rows [low, high) of a lease that holds [planes, rows, hidden] of `dtype`.

        Raises WorkerFailed if it cannot be read here, DeviceError.
        """
        planes, rows, hidden = shape
        row = hidden * dtype.itemsize
        start, size = self._address(lease)
        if not 0 <= low < high <= rows or planes * rows * row > size:
            raise WorkerFailed(f"rows [{low}, {high}) of {shape} are not in a lease of {size} bytes")
        compute = self._device.current()
        # Allocated on the copies' stream: its allocator reuses memory only after its last use, so no wait is needed.
        with self._device.using(self.stream):
            target = torch.empty((planes, high - low, hidden), dtype=dtype, device=self._device.torch)
        self._device.keep(target, compute)
        part = (high - low) * row
        for plane in range(planes):
            self._copy(target.data_ptr() + plane * part, start + (plane * rows + low) * row, part, lease.arena)
        return Fetched(target, self._device.record(self.stream))

    def store(self, rows: torch.Tensor, lease: wire.Lease) -> int:
        """Copy a tensor of the device into a lease, on the current stream; returns the bytes.

        They are there when that stream is done.  Raises WorkerFailed, DeviceError.
        """
        start, size = self._address(lease)
        if not rows.is_contiguous() or rows.nbytes > size:
            raise WorkerFailed(f"a lease of {size} bytes does not hold {rows.nbytes}")
        stream = self._device.current()
        self._device.keep(rows, stream)
        at = rows.data_ptr()
        for offset, count in self._pieces(start, rows.nbytes, lease.arena):
            self._device.copy(start + offset, at + offset, count, stream)
        return int(rows.nbytes)

    def _copy(self, target: int, source: int, size: int, arena: int) -> None:
        for offset, count in self._pieces(source, size, arena):
            self._device.copy(target + offset, source + offset, count, self.stream)

    def _pieces(self, address: int, size: int, arena: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of each part of [address, +size) that lies in one portion."""
        if arena != HOST:
            return iter(((0, size),))
        base, total = self._arenas[HOST]
        low, high = address, address + size
        return ((max(low, start) - low, min(high, start + count) - max(low, start))
                for start, count in _cut(base, total) if start < high and low < start + count)

    def _address(self, lease: wire.Lease) -> tuple[int, int]:
        """Where it begins, and its bytes.  Raises WorkerFailed."""
        arena = self._own if lease.arena != HOST and self._own else self._arenas.get(lease.arena)
        if arena is None:
            raise WorkerFailed(f"arena {lease.arena} is not open here")
        address, size = arena
        if lease.offset < 0 or lease.size < 0 or lease.offset + lease.size > size:
            raise WorkerFailed(f"lease [{lease.offset}, +{lease.size}) is outside arena {lease.arena} of {size} bytes")
        return address + lease.offset, lease.size


def _cut(address: int, size: int) -> list[tuple[int, int]]:
    """(address, bytes) of the portions of a region."""
    return [(address + at, min(PORTION_BYTES, size - at)) for at in range(0, size, PORTION_BYTES)]
