"""The one queue of images to encode.  Late binding: a job gets a worker only when that worker can start it.

So cancelling, placing again after a death and draining are changes to this queue, not messages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
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
    attempts: int = 0               # times handed to a worker, less those it was cut short
    queued: float = 0.0             # when it came
    due: float = 0.0                # its place in the queue: least first
    worker: str | None = None       # while in flight
    left: str | None = None         # the worker that it came back from
    started: float = 0.0            # when it was handed over
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
    """Jobs that wait, least `due` first, then in order of arrival."""

    def __init__(self) -> None:
        self._entries: list[QueueEntry] = []
        self.patches = 0

    def put(self, job: Job) -> None:
        """A job that a worker lost keeps its `due`, and so its place."""
        insort(self._entries, job.entry)
        self.patches += job.patches

    def remove(self, job: Job) -> bool:
        """Take a job out; False if it does not wait here."""
        at = bisect_left(self._entries, job.entry)
        if at == len(self._entries) or self._entries[at][2] is not job:
            return False
        del self._entries[at]
        self.patches -= job.patches
        return True

    def take_all(self) -> list[Job]:
        """Empty the queue."""
        jobs = list(self)
        self._entries, self.patches = [], 0
        return jobs

    def head(self) -> Job | None:
        return self._entries[0][2] if self._entries else None

    def __iter__(self) -> Iterator[Job]:
        return (job for _, _, job in self._entries)

    def __len__(self) -> int:
        return len(self._entries)
