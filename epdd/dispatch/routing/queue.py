"""The queue of images to encode.  Late binding: a job gets an encoder only when that encoder can start it.

Cancelling a job, retrying it and draining a worker therefore change this queue and send no messages.
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
    """One image to encode, as numbers; a subclass may add the image itself.

    Times are seconds of the clock that the router is called with.
    """

    request_id: str
    patches: int
    images: int = 1                 # of its request; in unit "request" the job costs 1 / images
    request_patches: int = 0        # of all images that its request has to encode; 0: of this one only
    exclusive: bool = False         # no other job may be in its worker
    queued: float = 0.0             # when it was submitted
    due: float = 0.0                # its order in the queue, least first
    worker: str | None = None       # while in flight
    left: str | None = None         # the worker that did not finish it
    started: float = 0.0            # when it was handed over
    tenant: str = ""                # tenants share the encoders fairly
    number: int = field(default_factory=lambda: next(_numbers))

    def cost(self, unit: str) -> float:
        """Its cost in patches, images or requests."""
        if unit == "patch":
            return float(self.patches)
        return 1.0 if unit == "image" else 1.0 / self.images

    @property
    def entry(self) -> QueueEntry:
        """Its sort key in the queue, and itself."""
        return self.due, self.number, self


QueueEntry = tuple[float, int, Job]      # sorted by the first two: no two jobs have the same number


class Queue:
    """Queued jobs: within a tenant by `due`, then in order of arrival.

    The next job is always of the tenant with the fewest jobs on encoders and ahead in the queue.
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[QueueEntry]] = {}       # by tenant; none is empty
        self._encoding: Counter[str] = Counter()            # jobs on encoders, by tenant
        self.patches = 0

    def put(self, job: Job) -> None:
        """Queue a job; a job that is retried keeps its `due` and so its place."""
        insort(self._lines.setdefault(job.tenant, []), job.entry)
        self.patches += job.patches

    def remove(self, job: Job) -> bool:
        """Take a job out; False if it is not queued."""
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
        """An encoder has begun the job."""
        self._encoding[job.tenant] += 1

    def ended(self, job: Job) -> None:
        """The encoder has ended the job."""
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
