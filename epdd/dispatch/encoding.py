"""Hands images to encoders as the router decides, and handles the end of each encoding."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from itertools import count

from epdd.dispatch.crash_policy import Attempts, CrashPolicy
from epdd.dispatch.encoder_cache.cache import HOST, EncoderCache, EncoderCacheEntry
from epdd.dispatch.encoder_cache.transport import EmbeddingTransport
from epdd.dispatch.request import Request
from epdd.dispatch.routing.queue import Job
from epdd.dispatch.routing.router import Router, RoutingDecision
from epdd.dispatch.routing.time_models import TimeModel
from epdd.errors import EpddError, NoWorker, ProtocolError, WorkerLost, from_wire
from epdd.families import ITEMSIZE, ModelInfo
from epdd.fleet.channel import Work, WorkEvent
from epdd.fleet.rate import Rate
from epdd.fleet.supervisor import Supervisor
from epdd.fleet.worker import Worker
from epdd.settings.config import Config
from epdd.settings.workers import RouterSettings as RouterConfig
from epdd.wire import Cancelled, Encode, Encoded, Failed, Ready

log = logging.getLogger(__name__)

SHARE_S = 60                # window of a worker's share of the encoded patches


@dataclass(eq=False, kw_only=True)
class ImageJob(Job):
    """A job with the embedding it makes and, while in flight, the work in its worker."""

    embedding: EncoderCacheEntry
    work: Work | None = None
    attempts: Attempts = field(default_factory=Attempts)


class Encoding:
    """The encode stage.  All calls come from the event loop; none awaits."""

    def __init__(self, supervisor: Supervisor, cache: EncoderCache, config: Config, family: ModelInfo) -> None:
        # The router's first guess of a typical image: half of the largest size.
        typical = max(1, family.rows_max * family.merge ** 2 // 2)
        self.settings = router = config.router      # in force: from the file, or from `epdctl policy`
        self.router = Router(router.policy, router.unit, router.ratio, router.slack, config.encoder.ahead_s, typical)
        self._supervisor = supervisor
        self._cache = cache
        self._family = family
        self.crashes = CrashPolicy(config.fleet.poison_s)
        self.transport = EmbeddingTransport(supervisor, cache)
        self._workers: dict[str, Worker] = {}       # encoders, as of the last change
        self._models: dict[str, tuple[Ready | None, TimeModel]] = {}
        self._jobs: dict[EncoderCacheEntry, ImageJob] = {}
        self._patches: dict[str, Rate] = {}          # encoded, by worker
        self._ids = count()
        self._timer: asyncio.TimerHandle | None = None

    def configure(self, router: RouterConfig) -> None:
        """Change the routing settings; images in flight stay where they are."""
        self.settings = router
        self.router.configure(router.policy, router.unit, router.ratio, router.slack, time.monotonic())
        self.pump()

    def submit(self, embedding: EncoderCacheEntry, request: Request, patches: int) -> None:
        """Queue an image; `patches` are those of all images that its request has to encode."""
        job = ImageJob(request.id, embedding.image.patches, len(request.images), patches, tenant=request.tenant,
                       embedding=embedding)
        self._jobs[embedding] = job
        self.router.submit(job, time.monotonic())

    def abandon(self, embedding: EncoderCacheEntry) -> None:
        """No request needs the image any more: take it out of the queue, or cancel its work."""
        job = self._jobs.get(embedding)
        if job is not None and job.work is not None:
            job.work.cancel()
        elif job is not None and self.router.withdraw(job):
            del self._jobs[embedding]

    def fleet_changed(self) -> None:
        """A worker's state changed."""
        self.transport.fleet_changed()
        gone, self._workers = self._workers, {worker.name: worker for worker in self._supervisor.role("encoder")}
        now = time.monotonic()
        for name, worker in self._workers.items():
            self.router.replicas.set_replica(name, worker.kind, self.model(worker), worker.takes_work, now)
        for name in gone.keys() - self._workers.keys():
            self.router.replicas.drop_replica(name)
            del self._models[name]
        self.pump()

    def pump(self) -> None:
        """Hand over every image that can start now.  Called after every change of queue or fleet."""
        if self._supervisor.stopping or not any(worker.comes_back for worker in self._workers.values()):
            for job in self.router.take_all():
                self._fail(job, NoWorker("no encoder is in service"))
        now = time.monotonic()
        while (choice := self.router.assign(now)) is not None:
            self._hand_over(choice)
        if self._timer is not None:
            self._timer.cancel()
        wake_at = self.router.wake_at(now)
        # The event loop has another clock.
        self._timer = None if wake_at is None else asyncio.get_running_loop().call_later(wake_at - now, self.pump)

    def _hand_over(self, choice: RoutingDecision) -> None:
        job, worker = choice.job, self._workers[choice.replica.name]
        assert isinstance(job, ImageJob)
        embedding, image = job.embedding, job.embedding.image
        log.debug("%s image=%s to=%s because=%s", job.request_id, embedding.key, worker.name, choice.reason)
        predicted_s = self.model(worker).predict(image.patches)
        embedding.record.handed_over(worker.name, choice.reason, time.monotonic(), job.started - job.queued,
                                     predicted_s)
        target = self._cache.begin_encoding(embedding, *self._place(embedding, worker))
        message = Encode(f"e{next(self._ids)}", target, image.grid, image.rows, image.stored, image.orientation)
        job.attempts.begun += 1
        try:
            job.work = worker.start(message, image.data, image.patches, predicted_s,
                                    lambda event: self._ended(job, worker, event))
        except WorkerLost as error:
            self._cache.end_encoding(embedding, target)
            self._ended(job, worker, error)
            return
        job.work.on_end(lambda: self._cache.end_encoding(embedding, target))

    def _place(self, embedding: EncoderCacheEntry, worker: Worker) -> tuple[int, int]:
        """The arena in which the encoder writes, and the most bytes."""
        if worker.ready is None or worker.ready.pool is None:
            return HOST, embedding.lease.size
        return self.transport.arena_for(worker), self._family.embedding_bytes(embedding.image.rows, worker.ready.dtype)

    def _ended(self, job: ImageJob, worker: Worker, event: WorkEvent) -> None:
        """The last event of an image's work."""
        embedding = job.embedding
        stuck = job.work is not None and not job.work.ended     # in a process that was killed and does not exit
        job.work = None
        embedding.record.hand_overs[-1].end(event, time.monotonic())
        if isinstance(event, Encoded):
            # Before the router uses the time model again.
            self.model(worker).observe(job.patches, event.seconds, time.monotonic())
        self.router.ended(job, time.monotonic())
        if isinstance(event, Encoded):
            self._encoded(job, worker, event)
        elif isinstance(event, Cancelled):
            # Another request may need the image since it was cancelled.
            if embedding.ref_count:
                job.attempts.begun -= 1
                self._submit_again(job)
            else:
                del self._jobs[embedding]
        elif stuck:
            # The process may still write to these bytes, so the requests are retried with others.
            self._fail(job, WorkerLost(f"{worker.name} was killed and does not exit"))
        else:
            error = _error(job, worker, event)
            final = self.crashes.image_lost(embedding.image.content, job.attempts, error, embedding.ref_count > 0)
            if final is not None:
                self._fail(job, final)
            else:
                log.warning("%s image=%s is retried: %s", job.request_id, embedding.key, error.message)
                self._submit_again(job)
        self.pump()

    def _submit_again(self, job: ImageJob) -> None:
        self.router.submit_again(job, exclusive=job.attempts.begun > 0)

    def _fail(self, job: Job, error: EpddError) -> None:
        assert isinstance(job, ImageJob)
        del self._jobs[job.embedding]
        self._cache.failed(job.embedding, error)

    def _encoded(self, job: ImageJob, worker: Worker, event: Encoded) -> None:
        image = job.embedding.image
        if (event.rows != image.rows or event.dtype not in ITEMSIZE
                or event.bytes != self._family.embedding_bytes(image.rows, event.dtype)
                or event.bytes > (job.embedding.gpu_lease or job.embedding.lease).size):
            worker.failed += 1
            log.error("%s %s wrote %s image tokens, %s bytes of %s; expected image tokens=%s", job.request_id,
                      worker.name, event.rows, event.bytes, event.dtype, image.rows)
            self._fail(job, ProtocolError("an encoder's answer does not fit its image"))
            return
        worker.done += 1
        worker.rate.add(1)
        self._patches.setdefault(worker.name, Rate(window_s=SHARE_S)).add(image.patches)
        del self._jobs[job.embedding]
        self._cache.written(job.embedding, event.bytes, event.dtype)

    def share(self, worker: Worker) -> float | None:
        """The encoder's share, 0 to 1, of the patches encoded in the last SHARE_S; None if there were none."""
        patches = {name: rate.events() for name, rate in self._patches.items() if name in self._workers}
        total = sum(patches.values())
        return patches.get(worker.name, 0) / total if total else None

    def slow(self, worker: Worker) -> bool:
        """Whether the encoder is SLOW_FACTOR slower than at its warm-up, for SLOW_AFTER_S (`time_models`)."""
        return self.model(worker).slow(time.monotonic())

    def model(self, worker: Worker) -> TimeModel:
        """The worker's time model, fitted anew after each restart."""
        ready, model = self._models.get(worker.name, (None, TimeModel()))
        if worker.ready is not None and ready is not worker.ready:
            ready, model = worker.ready, TimeModel(worker.ready.samples)
        self._models[worker.name] = ready, model
        return model

    @property
    def ratio_source(self) -> str:
        """Where R comes from: "set", "measured" or, with one kind of encoder only, "none"."""
        return ("set" if self.router.ratio_set else "none" if self.router.ratio_measured() is None else "measured")


def _error(job: ImageJob, worker: Worker, event: WorkEvent) -> EpddError:
    """The error of an image that was not encoded, by its last event."""
    if isinstance(event, EpddError):
        return event
    assert isinstance(event, Failed)
    worker.failed += 1
    error = from_wire(event.code, event.message)
    if error.status >= 500:
        log.error("%s %s image failed code=%s: %s", job.request_id, worker.name, event.code, event.message)
    return error
