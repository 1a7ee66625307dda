"""The arena of explored schedules: pages, the image in each, and the processes that may touch it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from epdd.arena import PAGE
from epdd.dispatch.encoder_cache.extents import Extents
from epdd.wire import Encode, Generate, Lease, WorkerSpec

NOBODY = -1                 # in a page that is allocated and not written


class Toucher(Protocol):
    """A worker process."""

    spec: WorkerSpec

    def touches(self) -> Iterator[tuple[Lease, bool]]:
        """Pages that it may read or write from now on."""


class Violation(AssertionError):
    """An invariant does not hold in this schedule."""


class Memory(Extents):
    """The arena's allocator, which also knows every page's content and the processes that may touch it."""

    def __init__(self, size: int) -> None:
        super().__init__(size, PAGE)
        self.pages = [NOBODY] * (self.size // PAGE)
        self.processes: list[Toucher] = []

    def take(self, length: int) -> int | None:
        offset = super().take(length)
        if offset is not None:
            self._untouched("given out", offset, self.rounded(length))
            self._fill(offset, length, NOBODY)
        return offset

    def release(self, offset: int, length: int) -> None:
        self._untouched("taken back", offset, self.rounded(length))
        super().release(offset, length)

    def _untouched(self, what: str, offset: int, length: int) -> None:
        for process in self.processes:
            for lease, _ in process.touches():
                if lease.offset < offset + length and offset < lease.offset + self.rounded(lease.size):
                    raise Violation(f"[{offset}, +{length}) is {what} while {process.spec.name} may touch {lease}")

    def handed_over(self, process: Toucher, message: Encode | Generate) -> None:
        """`process` gets a work: all its bytes must be allocated, and no process may write what another touches."""
        for lease, writes in touched(message):
            for start, end in self._free:
                if start < lease.offset + lease.size and lease.offset < end:
                    raise Violation(f"{process.spec.name} is handed {lease}, which is free")
            for other in self.processes:
                for taken, writing in other.touches():
                    if (writes or writing) and lease.offset < taken.offset + taken.size \
                            and taken.offset < lease.offset + lease.size:
                        raise Violation(f"{process.spec.name} is handed {lease} beside {other.spec.name}'s {taken}")

    def write(self, lease: Lease, image: int) -> None:
        self._fill(lease.offset, lease.size, image)

    def read(self, lease: Lease) -> int:
        """The image that the lease holds."""
        found = set(self.pages[lease.offset // PAGE:-(-(lease.offset + lease.size) // PAGE)])
        if len(found) != 1 or NOBODY in found:
            raise Violation(f"{lease} is read and holds {found}")
        return found.pop()

    def _fill(self, offset: int, length: int, image: int) -> None:
        first = offset // PAGE
        self.pages[first:first + self.rounded(length) // PAGE] = [image] * (self.rounded(length) // PAGE)


def touched(message: Encode | Generate) -> Iterator[tuple[Lease, bool]]:
    """The leases of a work, and whether it writes them."""
    if isinstance(message, Encode):
        yield message.lease, True
    else:
        for span in message.spans:
            yield span.lease, False
