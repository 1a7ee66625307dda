"""The one queue of images to encode.  Late binding: a job gets a worker only when that worker can start it.

So cancelling, placing again after a death and draining are changes to this queue, not messages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import count

_numbers = count()


@dataclass(eq=False)
class Job:
    """One image to encode, in numbers; who makes it may add what it stands for in a subclass.

    Times are seconds of the clock that the router is called with.
    """

    request_id: str
    patches: int
    images: int = 1                 # of its request: a request in flight is split over them
    request_patches: int = 0        # of all images of its request that are encoded with it; 0: of this one
    exclusive: bool = False         # goes alone: no other job beside it in its worker
    queued: float = 0.0             # when it came
    due: float = 0.0                # its place in the queue: least first
    worker: str | None = None       # while in flight
    left: str | None = None         # the worker that it came back from
    started: float = 0.0            # when it was handed over
    tenant: str = ""                # whose it is: tenants share the encoders fairly
    number: int = field(default_factory=lambda: next(_numbers))

    def cost(self, unit: str) -> float:
        """What it weighs in patches, images or requests."""
        if unit == "patch":
            return float(self.patches)
        return 1.0 if unit == "image" else 1.0 / self.images

    @property
    def entry(self) -> QueueEntry:
        """Its place in the queue, and itself."""
        return self.due, self.number, self


QueueEntry = tuple[float, int, Job]      # sorted by the first two: no two jobs have the same number


class Queue:
    """Jobs that wait: of a tenant least `due` first, then in order of arrival.

    Between tenants each next job is of the one with the fewest: those that encoders have and those before it count.
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[QueueEntry]] = {}       # by tenant; none is empty
        self._encoding: Counter[str] = Counter()            # jobs that encoders have, by tenant
        self.patches = 0

    def put(self, job: Job) -> None:
        """A job that a worker lost keeps its `due`, and so its place."""
        insort(self._lines.setdefault(job.tenant, []), job.entry)
        self.patches += job.patches

    def remove(self, job: Job) -> bool:
        """Take a job out; False if it does not wait here."""
        line = self._lines.get(job.tenant, [])
        at = bisect_left(line, job.entry)
        if at == len(line) or line[at][2] is not job:
            return False
        del line[at]
        if not line:
            del self._lines[job.tenant]
        self.patches -= job.patches
        return True

    def began(self, job: Job) -> None:
        """An encoder has it now."""
        self._encoding[job.tenant] += 1

    def ended(self, job: Job) -> None:
        """That encoder has it no more."""
        self._encoding[job.tenant] -= 1
        if not self._encoding[job.tenant]:
            del self._encoding[job.tenant]

    def take_all(self) -> list[Job]:
        """Empty the queue."""
        jobs = list(self)
        self._lines.clear()
        self.patches = 0
        return jobs

    def head(self) -> Job | None:
        return next(iter(self), None)

    def __iter__(self) -> Iterator[Job]:
        if len(self._lines) == 1:
            for line in self._lines.values():
                return (job for _, _, job in line)
        return self._merged()

    def _merged(self) -> Iterator[Job]:
        heads = [(self._encoding[tenant], *line[0][:2], tenant, 0) for tenant, line in self._lines.items()]
        heapify(heads)
        while heads:
            before, _, _, tenant, at = heads[0]
            line = self._lines[tenant]
            yield line[at][2]
            if at + 1 < len(line):
                heapreplace(heads, (before + 1, *line[at + 1][:2], tenant, at + 1))
            else:
                heappop(heads)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))
