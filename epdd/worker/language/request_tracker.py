"""A prefill-decode worker's requests from their message to their last word: the same with a model and without."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from epdd import wire
from epdd.errors import ProtocolError
from epdd.worker.language.scheduler import Scheduler, Sequence
from epdd.worker.process.loop import Send, failed

R = TypeVar("R", bound=Sequence)


class RequestTracker(ABC, Generic[R]):
    """Takes, cancels and ends requests; a subclass makes them of messages and moves them on."""

    answered: tuple[type[Exception], ...] = (Exception,)    # faults of a message that are told to the daemon

    _send: Send
    _scheduler: Scheduler[R]
    _requests: dict[str, R]

    def submit(self, message: wire.ToWorker, raw: bytes) -> None:
        """Queue a request; a bad one is answered by Failed.  Raises ProtocolError on another role's work."""
        if not isinstance(message, wire.Generate):
            raise ProtocolError(f"a PD worker cannot do {type(message).__name__}")
        if message.id in self._requests:
            raise ProtocolError(f"request {message.id} is here already")
        try:
            request = self._request(message, raw)
            self._scheduler.add(request)
        except self.answered as error:
            self._send(failed(message.id, error))
            return
        self._requests[message.id] = request

    def cancel(self, work_id: str) -> None:
        """Drop a request, whatever its stage; unknown ids have been answered already."""
        request = self._requests.get(work_id)
        if request:
            self._end(request, wire.Cancelled(work_id))

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @abstractmethod
    def _request(self, message: wire.Generate, raw: bytes) -> R:
        """The request that a message asks for.  Raises what is wrong with it."""

    def _end(self, request: R, last: wire.FromWorker) -> None:
        del self._requests[request.id]
        self._scheduler.remove(request)
        self._release(request)
        self._send(last)

    def _release(self, request: R) -> None:
        """Give back what the request holds besides its place in the scheduler."""
