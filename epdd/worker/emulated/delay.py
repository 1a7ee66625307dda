"""Delays a role's answers until their modelled time, without drift.

The real work is done when its modelled time begins.  Then the worker waits on its socket, so that heartbeats, cancels
and a hang-up are handled while it "computes".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from epdd import families, wire
from epdd.emulated_time import Clock, EmulatedModel, EmulatedWorker, Timeline
from epdd.families import ModelInfo
from epdd.worker.process.loop import Send

log = logging.getLogger(__name__)

SLICE_S = 0.2           # the longest wait in one step: heartbeats go out in between
# poll counts in whole milliseconds, rounded up: the last ones are slept.
EXACT_S = 0.002


class EmulatedTime:
    """One piece of work at a time, and its answers.  Subclasses choose what is next."""

    def __init__(self, name: str, emulated: EmulatedWorker, send: Send, wait: Callable[[float], None],
                 clock: Clock) -> None:
        """`wait(seconds)` returns early when the socket has something to read."""
        self._name, self._send, self._wait, self.clock = name, send, wait, clock
        self.timeline = Timeline(emulated.group, f"{emulated.seed} {name}")
        self.served = self.late = 0                     # pieces of work, and those that took longer than modelled
        self._delayed: list[wire.FromWorker] = []       # go out at the end of the present piece of work
        self._end: float | None = None                  # that end, in emulated seconds

    @property
    def computing(self) -> bool:
        """Whether a piece of work has begun and not ended by the emulated clock."""
        return self._end is not None

    def step(self) -> None:
        """Begin the next piece of work, or wait a little for the present one's end; then its answers go out."""
        if self._end is None:
            self._begin()
        if self._end is not None and self._reached(self._end):
            delayed, self._delayed, self._end = self._delayed, [], None
            for message in delayed:
                self._send(message)

    def _begin(self) -> None:
        """Do the next piece of real work, `_spend` its time and delay its answers."""
        raise NotImplementedError

    def _spend(self, ready: float, seconds: float) -> float:
        """Let the work just done, there from `ready` on, take its modelled `seconds`; those it does take."""
        service = self.timeline.serve(ready, seconds, self.clock.now())
        self.served += 1
        if service.late:
            self.late += 1
            if str(self.late).rstrip("0") == "1":       # at 1, 10, 100 ...
                log.warning("%s was slower than its profile count=%s of=%s, now %.3f s where %.3f s are due",
                            self._name, self.late, self.served, self.clock.real(service.end - service.start),
                            self.clock.real(seconds))
        self._end = service.end
        return service.end - service.start

    def _reached(self, end: float) -> bool:
        left = self.clock.real(end - self.clock.now())
        if left > EXACT_S:
            self._wait(min(left - EXACT_S / 2, SLICE_S))
            return False
        if left > 0:
            time.sleep(left)
        return True


def sized_info(folder: str, model: EmulatedModel) -> ModelInfo:
    """The checkpoint's placeholders with the profile's sizes."""
    return replace(families.load(folder), patch=model.patch, merge=model.merge, hidden=model.hidden,
                   planes=model.planes)
