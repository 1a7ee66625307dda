"""Images to encoders: queue, router and hand-over in one place, and what happens when an encoding ends."""

from __future__ import annotations

import logging
import time
from itertools import count

from epdd.config import Config
from epdd.config import Router as RouterConfig
from epdd.dispatch.history import History
from epdd.dispatch.leases import Embedding, Leases
from epdd.dispatch.queue import Job, JobTable
from epdd.dispatch.router import CPU, GPU, Candidate, Pools, Router
from epdd.dispatch.timing import TimeModel, capability_ratio
from epdd.errors import EpddError, NoWorker, ProtocolError, WorkerLost, from_wire
from epdd.families import ITEMSIZE, Family
from epdd.fleet.channel import Event
from epdd.fleet.supervisor import Supervisor
from epdd.fleet.worker import Rate, State, Worker
from epdd.wire import Cancelled, Encode, Encoded, Failed, Ready

log = logging.getLogger(__name__)

# An image that cost two workers their lives is not tried on a third.  The second time it goes alone, so that the
# innocent who were with it the first time do not fail with it.
ATTEMPTS_MAX = 2
PATIENCE_FACTOR = 20.0      # silence excused for an image: so many times its predicted time,
PATIENCE_MIN_S = 60.0       # and at least this
SHARE_S = 60.0              # about so far back goes a worker's share of the encoded work
SLOW_FACTOR = 1.5           # a worker over so many times the time of its start ...
SLOW_S = 30.0               # ... for longer than this is slow


class Encoding:
    """The encode stage.  Everything happens in the event loop, between two awaits."""

    def __init__(self, supervisor: Supervisor, leases: Leases, config: Config, family: Family,
                 history: History) -> None:
        self.table = JobTable()
        self.router = Router(config.router.policy)
        self.configure(config.router)
        self._slots = 1 + config.encoder.ahead
        self._supervisor = supervisor
        self._leases = leases
        self._family = family
        self._history = history
        self._models: dict[str, TimeModel] = {}
        self._fitted: dict[str, Ready] = {}
        self._ids = count()
        self._patches: dict[str, Rate] = {}         # encoded, by worker
        self._slow_since: dict[str, float] = {}
        # R is stated for an image of half the largest size: small ones are overhead, the largest are rare.
        self._typical_patches = max(1, family.rows_max * family.merge ** 2 // 2)

    def configure(self, router: RouterConfig) -> None:
        """Take another policy, unit or ratio from now on; what is in flight stays where it is."""
        if router.policy != self.router.policy:
            self.router = Router(router.policy)
        self.settings = router          # in force: a file's, or an operator's of this moment
        self.unit = router.unit
        self._ratio_set = router.ratio

    def submit(self, embedding: Embedding, request_id: str, images: int) -> None:
        """Queue an image whose lease is taken."""
        self.table.put(Job(embedding, request_id, images))

    def abandon(self, embedding: Embedding) -> None:
        """Nobody wants it any more: out of the queue, or if it is in flight, tell the worker."""
        job = self.table.find(embedding)
        if job is None:
            self.table.drop(embedding)
        elif job.work is not None:
            job.work.cancel()

    def pump(self) -> None:
        """Hand over whatever can start now.  Called after every change of queue or fleet."""
        workers = {worker.name: worker for worker in self._supervisor.role("encoder")}
        if self._supervisor.stopping or all(worker.state is State.FAILED for worker in workers.values()):
            for lost in self.table.take_all():
                self._leases.failed(lost.embedding, NoWorker("no encoder can be started"))
            return
        while (job := self.table.head()) is not None:
            choice = self.router.pick(self.pools(job))
            if choice.worker is None:
                return
            log.debug("%s image=%s to=%s because=%s", job.request_id, job.embedding.key, choice.worker, choice.reason)
            self._hand_over(job, workers[choice.worker], choice.reason)

    def _hand_over(self, job: Job, worker: Worker, reason: str) -> None:
        embedding, image = job.embedding, job.embedding.image
        self.table.hand_over(job, worker.name)
        self._history.handed_over(embedding, worker.name, reason, time.monotonic() - job.queued,
                                  self.model(worker).predict(image.patches))
        message = Encode(f"e{next(self._ids)}", embedding.lease, image.grid, image.rows)
        patience_s = max(PATIENCE_MIN_S, PATIENCE_FACTOR * self.model(worker).predict(image.patches))
        self._leases.hold(embedding)
        try:
            job.work = worker.start(message, image.data, image.patches, patience_s,
                                    lambda event: self._ended(job, worker, event))
        except WorkerLost as error:
            self._leases.unhold(embedding)
            self._ended(job, worker, error)
            return
        job.work.on_end(lambda: self._leases.unhold(embedding))

    def _ended(self, job: Job, worker: Worker, event: Event) -> None:
        """The worker's last word on an image."""
        self.table.ended(job)
        embedding = job.embedding
        self._history.encoding_ended(embedding, event)
        if isinstance(event, Encoded):
            self._encoded(job, worker, event)
        elif isinstance(event, Failed):
            worker.failed += 1
            error = from_wire(event.code, event.message)
            if error.status >= 500:
                log.error("%s %s image failed code=%s: %s", job.request_id, worker.name, event.code, event.message)
            self._leases.failed(embedding, error)
        elif isinstance(event, Cancelled):
            # Somebody may have asked for the same image after it was cancelled.
            if embedding.refs:
                job.attempts -= 1
                self.table.put(job, first=True)
        elif isinstance(event, EpddError):
            if event.retryable and job.attempts < ATTEMPTS_MAX and embedding.refs:
                log.warning("%s image=%s is placed again: %s", job.request_id, embedding.key, event.message)
                self.table.put(job, first=True)
            else:
                self._leases.failed(embedding, _given_up(event))
        self.pump()

    def _encoded(self, job: Job, worker: Worker, event: Encoded) -> None:
        image = job.embedding.image
        if (event.rows != image.rows or event.dtype not in ITEMSIZE
                or event.bytes != self._family.embedding_bytes(image.rows, event.dtype)
                or event.bytes > job.embedding.lease.size):
            worker.failed += 1
            log.error("%s %s wrote %s rows, %s bytes of %s where %s rows were due", job.request_id, worker.name,
                      event.rows, event.bytes, event.dtype, image.rows)
            self._leases.failed(job.embedding, ProtocolError("an encoder's answer does not fit its image"))
            return
        worker.done += 1
        worker.rate.add(1)
        self._observe(worker, image.patches, event.seconds)
        self._leases.written(job.embedding, event.bytes, event.dtype)

    def _observe(self, worker: Worker, patches: int, seconds: float) -> None:
        self._patches.setdefault(worker.name, Rate(SHARE_S)).add(patches)
        model = self.model(worker)
        model.observe(patches, seconds)
        if model.correction > SLOW_FACTOR:
            self._slow_since.setdefault(worker.name, time.monotonic())
        else:
            self._slow_since.pop(worker.name, None)

    def share(self, worker: Worker) -> float | None:
        """The encoder's part, 0 to 1, of the patches encoded in about the last minute; None if there were none."""
        rates = {other.name: rate.value() for other in self._supervisor.role("encoder")
                 if (rate := self._patches.get(other.name))}
        # A rate that decays never reaches zero; less than a patch is nothing.
        if (total := sum(rates.values())) * SHARE_S < 1.0:
            return None
        return rates.get(worker.name, 0.0) / total

    def slow(self, worker: Worker) -> bool:
        """Over SLOW_FACTOR times the time of its start, and has been for SLOW_S."""
        since = self._slow_since.get(worker.name)
        return (since is not None and self.model(worker).correction > SLOW_FACTOR
                and time.monotonic() - since > SLOW_S)

    def model(self, worker: Worker) -> TimeModel:
        """The worker's time model, fitted anew after each restart."""
        if worker.ready is not None and self._fitted.get(worker.name) is not worker.ready:
            self._fitted[worker.name] = worker.ready
            self._models[worker.name] = TimeModel(worker.ready.samples)
        return self._models.setdefault(worker.name, TimeModel())

    def pools(self, job: Job | None = None) -> Pools:
        """The encoders that take work, as the router sees them for `job`."""
        now = time.monotonic()
        candidates = [self._candidate(worker, job, now) for worker in self._supervisor.role("encoder")
                      if worker.takes_work]
        waiting = sum(other.cost(self.unit) for other in self.table.waiting() if other is not job)
        return Pools(candidates, self.ratio(), waiting, job.cost(self.unit) if job else 1.0)

    def _candidate(self, worker: Worker, job: Job | None, now: float) -> Candidate:
        held, model = self.table.on(worker.name), self.model(worker)
        left = sum(model.predict(other.embedding.image.patches) for other in held)
        if held:
            left = max(0.0, left - (now - held[0].started))
        alone = job is not None and job.attempts > 0 or any(other.attempts > 1 for other in held)
        return Candidate(worker.name, worker.kind, sum(other.cost(self.unit) for other in held),
                         free=len(held) < (1 if alone else self._slots), seconds_left=left,
                         seconds_for_job=model.predict(job.embedding.image.patches) if job else 0.0)

    def measured_ratio(self) -> float | None:
        """R from the time models; None unless both kinds take work."""
        models = {kind: [self.model(worker) for worker in self._supervisor.role("encoder")
                         if worker.kind == kind and worker.takes_work] for kind in (CPU, GPU)}
        return capability_ratio(models[GPU], models[CPU], self._typical_patches)

    @property
    def ratio_source(self) -> str:
        """Where R comes from: "set", "measured" or, with one kind of encoder only, "none"."""
        return "set" if self._ratio_set else "none" if self.measured_ratio() is None else "measured"

    def ratio(self) -> float:
        """R in force: set by the operator, else measured, else 1."""
        return self._ratio_set or self.measured_ratio() or 1.0


def _given_up(error: EpddError) -> EpddError:
    """`error`, or for a loss one that says: not once more, not even by the request."""
    if isinstance(error, WorkerLost):
        error = WorkerLost(error.message)
        error.retryable = False
    return error
