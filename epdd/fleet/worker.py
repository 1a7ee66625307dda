"""One worker as the daemon sees it: spec, state, channel, and the numbers shown for it."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import time
from collections.abc import Callable

from epdd.errors import WorkerLost
from epdd.fleet.channel import Channel, Work, WorkEvent
from epdd.fleet.process import Process
from epdd.wire import Encode, Generate, Heartbeat, Loading, Opened, Ready, WorkerSpec

log = logging.getLogger(__name__)

RATE_WINDOW_S = 10.0


class State(enum.Enum):
    STARTING = "STARTING"       # forked or about to be; loading
    READY = "READY"
    DRAINING = "DRAINING"       # finishes what it has, takes nothing new
    GONE = "GONE"               # between death and restart
    FAILED = "FAILED"           # given up: died again and again, or cannot start


class DecayRate:
    """Events a second over about the last `window_s`, decaying exponentially."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self.window_s = window_s
        self._value = 0.0
        self._at = time.monotonic()

    def add(self, count: float) -> None:
        self._value = self.value() + count / self.window_s
        self._at = time.monotonic()

    def value(self) -> float:
        return self._value * math.exp((self._at - time.monotonic()) / self.window_s)


class Worker:
    """State changes come from the supervisor alone; dispatch reads them and calls `start`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.role = spec.role
        self.state = State.STARTING
        self.process: Process | None = None
        self.channel: Channel | None = None
        self.ready: Ready | None = None         # of the living process
        self.was_ready = False                  # ever
        self.ready_at = 0.0                     # when the living process was ready
        self.arenas: dict[int, str] = {}        # the living process's answers: "" or why it cannot use an arena
        self.warm_up_s = 0.0                    # how long its warm-up took: a PD worker's is one full step
        self.loading = Loading("queued", 0.0)
        self._stage_at = 0.0                    # when that stage began
        self.beat = Heartbeat(0)
        self.hurry = asyncio.Event()            # set: start again without waiting any longer
        self.restarting = False                 # we ended the process ourselves: an operator's wish or another seat
        self.wanted = True                      # False: no seat for it any more; it goes when its process has
        self.drained = False                    # an operator took it out of rotation; outlives the process
        self.began = time.monotonic()           # of the last start
        self.restarts = 0
        self.done = 0                           # works ended well
        self.failed = 0
        self.rate = DecayRate()                      # images or tokens a second
        self.fault = ""                         # what is known to be wrong with the living process
        self.last_error = ""                    # how the last one ended; kept when the next is well

    @property
    def kind(self) -> str:
        """The pool it belongs to: "cpu" or "gpu"."""
        return "cpu" if self.spec.device == "cpu" else "gpu"

    @property
    def takes_work(self) -> bool:
        return self.state is State.READY

    @property
    def comes_back(self) -> bool:
        """It takes work, or will without an operator's word."""
        return self.takes_work or (self.wanted and not self.drained and self.state is not State.FAILED)

    def loads(self, message: Loading) -> None:
        """Progress before Ready."""
        # A line a quarter of the weights: the journal shows progress, not each step of it.
        quarters = [(loading.stage, int(loading.done * 4)) for loading in (message, self.loading)]
        if message.stage == "weights" and quarters[0] != quarters[1]:
            log.info("%s loading stage=%s done=%.0f%%", self.name, message.stage, 100 * message.done)
        if message.stage != self.loading.stage:
            self._stage_at = time.monotonic()
        self.loading = message

    def is_ready(self, message: Ready) -> None:
        """The end of the warm-up, which is the last stage."""
        self.ready, self.was_ready, self.ready_at = message, True, time.monotonic()
        self.warm_up_s = self.ready_at - self._stage_at

    def opened(self, message: Opened) -> None:
        """Whether the process can use an arena that it was told of."""
        self.arenas[message.arena] = message.error
        log.log(logging.WARNING if message.error else logging.DEBUG, "%s arena=%s %s", self.name, message.arena,
                message.error or "can be used")

    def was_well(self, seconds: float) -> bool:
        """Whether the process, living or just dead, has been ready for so long."""
        return self.ready is not None and time.monotonic() - self.ready_at >= seconds

    @property
    def in_flight(self) -> int:
        return len(self.channel.works) if self.channel else 0

    @property
    def in_flight_cost(self) -> int:
        return self.channel.in_flight_cost if self.channel else 0

    def start(self, message: Encode | Generate, raw: bytes, cost: int, expected_s: float,
              sink: Callable[[WorkEvent], None]) -> Work:
        """Hand over work whose longest step should take `expected_s`.

        Raises WorkerLost if the process is on its way out.
        """
        if self.channel is None or self.state not in (State.READY, State.DRAINING):
            raise WorkerLost(f"{self.name} is {self.state.value}")
        return self.channel.start(message, raw, cost, expected_s, sink)
