"""The two ends of a handover as roles of real workers, for `handover.py`; the bytes have no meaning.

The fork server imports this module, so that bootstrap makes these roles instead of encoder and engine.  On the work
REPORT they write their measurements to the file that the spec names as the model.
"""

from __future__ import annotations

import json
import resource
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from epdd import wire
from epdd.arena import Mapping
from epdd.worker import bootstrap
from epdd.worker.process.loop import Send

REPORT, TOKEN = "report", "token"
SOURCE_BYTES = 64 << 20         # the largest image's embedding


class End:
    """The common part of both."""

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping, send: Send) -> None:
        self._file, self._arena, self._send = Path(spec.model), arena, send
        self._works: dict[str, dict[str, float]] = {}
        self._waiting: deque[Any] = deque()

    def warm_up(self, progress: Callable[[float], None]) -> wire.Ready:
        while not self._arena.populate():       # as bootstrap's own thread does, which is not waited for
            time.sleep(0.01)
        return wire.Ready(binding=wire.Binding((), (), 1), dtype="bfloat16")

    def submit(self, message: Any, raw: bytes) -> None:
        if message.id != REPORT:
            self._waiting.append(message)
            return
        self._file.write_text(json.dumps({"works": self._works, "huge_bytes": self._arena.huge_bytes}))
        self._send(wire.Cancelled(REPORT))

    def work(self, message: Any) -> None:
        raise NotImplementedError

    def cancel(self, work_id: str) -> None:
        pass

    def heartbeat(self) -> wire.Heartbeat:
        return wire.Heartbeat(steps=len(self._works))

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def step(self) -> None:
        """One piece of work, answered before the next begins, as an encoder does."""
        message = self._waiting.popleft()
        if message.id.startswith(TOKEN):
            self._send(wire.Done(message.id, "stop"))
        else:
            self.work(message)


class Writer(End):
    """An encoder that copies ready embeddings into leases."""

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping, send: Send) -> None:
        super().__init__(spec, arena, send)
        self._source = torch.ones(SOURCE_BYTES // 2, dtype=torch.bfloat16)

    def work(self, message: Any) -> None:
        count = message.lease.size // 2
        self._source[0] = self._source[count - 1] = mark(message.id)
        before, began = faults(), time.monotonic()
        torch.frombuffer(self._arena.view(message.lease), dtype=torch.bfloat16).copy_(self._source[:count])
        written = time.monotonic()
        self._works[message.id] = {"began": began, "written": written, "faults": faults() - before}
        self._send(wire.Encoded(message.id, message.rows, message.lease.size, "bfloat16", written - began))


class Reader(End):
    """A prefill-decode worker that makes tensors of leases and reads them."""

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping, send: Send) -> None:
        super().__init__(spec, arena, send)
        self._private = 0           # after the previous work: the query takes a part of the measured time

    def work(self, message: Any) -> None:
        before = faults()
        tensors = [torch.frombuffer(self._arena.view(span.lease), dtype=torch.bfloat16) for span in message.spans]
        usable = time.monotonic()
        ends = [float(tensor[at]) for tensor in tensors for at in (0, -1)]
        made = faults()
        for tensor in tensors:
            tensor.view(torch.int64).sum()
        read = time.monotonic()
        private, self._private = self._private, anonymous()
        self._works[message.id] = {
            "usable": usable, "read_s": read - usable, "faults": made - before, "read_faults": faults() - made,
            "private_bytes": self._private - private if private else 0,
            "wrong": sum(end != mark(message.id) for end in ends)}
        self._send(wire.Done(message.id, "stop"))


def mark(work_id: str) -> float:
    """The number at both ends of request "number/image"'s embedding: an earlier one has another."""
    return float(int(work_id.split("/")[0]) % 100 + 1)


def faults() -> int:
    """Page faults of this process, copies on write included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def anonymous() -> int:
    """Private memory in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


bootstrap.role_of = lambda spec: {"encoder": Writer, "pd": Reader}[spec.role]
