"""One worker as the daemon sees it: spec, state, channel, and the numbers shown for it."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable

from epdd.errors import WorkerLost
from epdd.fleet.channel import Channel, Work, WorkEvent
from epdd.fleet.process import Process
from epdd.fleet.rate import Rate
from epdd.wire import Encode, Generate, Heartbeat, Loading, Opened, Ready, WorkerSpec

log = logging.getLogger(__name__)


class State(enum.Enum):
    STARTING = "STARTING"       # forked or about to be; loading
    READY = "READY"
    DRAINING = "DRAINING"       # finishes its work, takes no new work
    GONE = "GONE"               # between exit and restart
    FAILED = "FAILED"           # given up: died fleet.max_failures times in a row, or cannot start


class Worker:
    """Only the supervisor changes the state; dispatch reads it and calls `start`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.role = spec.role
        self.state = State.STARTING
        self.process: Process | None = None
        self.channel: Channel | None = None
        self.ready: Ready | None = None         # of the present process
        self.was_ready = False                  # this process or an earlier one
        self.ready_at = 0.0                     # when the present process was ready
        self.arenas: dict[int, str] = {}        # arena -> "" or why the present process cannot use it
        self.warm_up_s = 0.0                    # a PD worker's warm-up is one full step
        self.loading = Loading("queued", 0.0)
        self._stage_at = 0.0                    # when this stage of loading began
        self.heartbeat = Heartbeat(0)
        self.retry_now = asyncio.Event()        # set: end the backoff
        self.restarting = False                 # the daemon ended the process: `epdctl restart`, or another placement
        self.wanted = True                      # False: no placement for it; it is removed when its process has exited
        self.drained = False                    # by `epdctl drain`; outlives the process
        self.began = time.monotonic()           # when the last start began
        self.restarts = 0
        self.done = 0                           # works that ended without an error
        self.failed = 0
        self.rate = Rate()                      # images or tokens a second
        self.fault = ""                         # what is wrong with the present process
        self.last_error = ""                    # why the last process ended; kept when the next is ready

    @property
    def kind(self) -> str:
        """"cpu" or "gpu"."""
        return "cpu" if self.spec.device == "cpu" else "gpu"

    @property
    def takes_work(self) -> bool:
        return self.state is State.READY

    @property
    def comes_back(self) -> bool:
        """It takes work, or will again without an operator's command."""
        return self.takes_work or (self.wanted and not self.drained and self.state is not State.FAILED)

    def on_loading(self, message: Loading) -> None:
        """Progress before Ready."""
        # A log line for each quarter of the weights, not for each message.
        quarters = [(loading.stage, int(loading.done * 4)) for loading in (message, self.loading)]
        if message.stage == "weights" and quarters[0] != quarters[1]:
            log.info("%s loading stage=%s done=%.0f%%", self.name, message.stage, 100 * message.done)
        if message.stage != self.loading.stage:
            self._stage_at = time.monotonic()
        self.loading = message

    def on_ready(self, message: Ready) -> None:
        """The warm-up, the last stage of loading, is done."""
        self.ready, self.was_ready, self.ready_at = message, True, time.monotonic()
        self.warm_up_s = self.ready_at - self._stage_at

    def on_opened(self, message: Opened) -> None:
        """The process has opened an arena, or could not."""
        self.arenas[message.arena] = message.error
        log.log(logging.WARNING if message.error else logging.DEBUG, "%s arena=%s %s", self.name, message.arena,
                message.error or "can be used")

    def was_ready_for(self, seconds: float) -> bool:
        """Whether the last process was ready for at least `seconds`."""
        return self.ready is not None and time.monotonic() - self.ready_at >= seconds

    @property
    def in_flight(self) -> int:
        return len(self.channel.works) if self.channel else 0

    @property
    def in_flight_cost(self) -> int:
        return self.channel.in_flight_cost if self.channel else 0

    def start(self, message: Encode | Generate, raw: bytes, cost: int, expected_s: float,
              sink: Callable[[WorkEvent], None]) -> Work:
        """Hand over work whose longest step should take `expected_s`.  Raises WorkerLost if the process is exiting."""
        if self.channel is None or self.state not in (State.READY, State.DRAINING):
            raise WorkerLost(f"{self.name} is {self.state.value}")
        return self.channel.start(message, raw, cost, expected_s, sink)
