"""Limits the requests in flight, and refuses a request that could never run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from epdd.dispatch.encoder_cache.cache import EncoderCache
from epdd.dispatch.request import Request
from epdd.errors import BadRequest, ContextLength, NoWorker, Overloaded
from epdd.families import ModelInfo
from epdd.fleet.supervisor import Supervisor


class Admission:
    """Counts the requests in flight; knows the limits of the workers in service."""

    def __init__(self, max_requests: int, supervisor: Supervisor, cache: EncoderCache, family: ModelInfo) -> None:
        self._max_requests = max_requests
        self._supervisor = supervisor
        self._cache = cache
        self._family = family
        self._max_model_len = 0
        self.in_flight = 0
        self.draining = False

    def check_load(self) -> None:
        """Raises Overloaded at the limit (`server.max_requests`), NoWorker while no PD worker can serve."""
        if self.draining:
            raise NoWorker("the server is stopping")
        # A request waits for a PD worker that restarts, not for one that has never been ready.
        # Encoders do not count: text needs none, and images wait for them in the queue.
        workers = self._supervisor.role("pd")
        if not any(worker.comes_back and worker.was_ready for worker in workers):
            served = any(worker.was_ready for worker in workers)
            raise NoWorker(f"no prefill-decode worker is {'in service' if served else 'ready yet'}")
        if self.in_flight >= self._max_requests:
            raise Overloaded(f"{self.in_flight} requests are being served, the limit")

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count one request in flight.  Raises what `check_load` raises."""
        self.check_load()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def max_model_len(self) -> int:
        """Tokens of prompt and answer that every PD worker can hold; the last known number while none is ready."""
        known = [worker.ready.max_model_len for worker in self._supervisor.role("pd") if worker.ready is not None]
        if known:
            self._max_model_len = min(known)
        return self._max_model_len or self._family.max_model_len

    def check(self, request: Request) -> None:
        """Raises ContextLength or BadRequest if the request could not run even on an idle daemon."""
        total, limit = len(request.tokens) + request.sampling.max_tokens, self.max_model_len()
        if total > limit:
            raise ContextLength(f"This model's maximum context length is {limit} tokens. However, you requested "
                                f"{total} tokens ({len(request.tokens)} in the messages, "
                                f"{request.sampling.max_tokens} in the completion).", param="messages")
        needed = self._cache.needed(request.images, self.embedding_sizes(request))
        if needed > self._cache.size:
            raise BadRequest(f"the images need {needed} bytes of shared memory; the server has {self._cache.size}",
                             code="image_too_large", param="messages")

    def embedding_sizes(self, request: Request) -> list[int]:
        """Arena bytes to lease for each image: enough for float32; the rest is released after encoding."""
        return [self._family.embedding_bytes(image.rows) for image in request.images]
