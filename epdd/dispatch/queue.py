"""The one queue of images to encode.  Late binding: a job gets a worker only when that worker can start it.

So cancelling, placing again after a death and draining are changes to this queue and table, not messages.
In flight is what the table says; there are no counters beside it that could drift.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from epdd.dispatch.leases import Embedding
from epdd.fleet.channel import Work


@dataclass(eq=False)
class Job:
    """One image to encode."""

    embedding: Embedding
    request_id: str
    images: int                     # images of its request: a request in flight is split over them
    attempts: int = 0               # times handed to a worker, less those it was cut short
    worker: str | None = None       # while in flight
    work: Work | None = None
    started: float = 0.0            # time.monotonic() of the hand-over
    queued: float = field(default_factory=time.monotonic)

    def cost(self, unit: str) -> float:
        """What it weighs in patches, images or requests."""
        if unit == "patch":
            return float(self.embedding.image.patches)
        return 1.0 if unit == "image" else 1.0 / self.images


class JobTable:
    """Jobs waiting, in order, and jobs in flight, by worker."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._in_flight: dict[str, list[Job]] = {}

    def put(self, job: Job, first: bool = False) -> None:
        """Queue a job; `first` for one that a worker lost: it has waited already."""
        job.worker = job.work = None
        if first:
            self._waiting.appendleft(job)
        else:
            self._waiting.append(job)

    def head(self) -> Job | None:
        """The oldest job that somebody still wants."""
        while self._waiting and self._waiting[0].embedding.dropped:
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def drop(self, embedding: Embedding) -> None:
        """Forget the job that waits for an embedding, and with it the image's bytes."""
        for job in self._waiting:
            if job.embedding is embedding:
                self._waiting.remove(job)
                return

    def hand_over(self, job: Job, worker: str) -> None:
        """The head goes to a worker."""
        assert self._waiting[0] is job
        self._waiting.popleft()
        job.worker, job.started = worker, time.monotonic()
        job.attempts += 1
        self._in_flight.setdefault(worker, []).append(job)

    def ended(self, job: Job) -> None:
        """Its worker is done with it."""
        assert job.worker is not None
        self._in_flight[job.worker].remove(job)

    def on(self, worker: str) -> list[Job]:
        """In flight on one worker, oldest first."""
        return self._in_flight.get(worker, [])

    def waiting(self) -> Iterator[Job]:
        return (job for job in self._waiting if not job.embedding.dropped)

    def find(self, embedding: Embedding) -> Job | None:
        """The job in flight for an embedding."""
        return next((job for jobs in self._in_flight.values() for job in jobs if job.embedding is embedding), None)

    def take_all(self) -> list[Job]:
        """Empty the queue; what is in flight stays."""
        jobs = list(self.waiting())
        self._waiting.clear()
        return jobs
