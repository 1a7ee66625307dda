"""The emulated encoder role: one image after another, each for as long as the time model says."""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from epdd import families, wire
from epdd.arena import Mapping
from epdd.emulated_time import Clock, EmulatedModel, EncoderGroup
from epdd.errors import ProtocolError, WorkerFailed
from epdd.worker.emulated import pattern
from epdd.worker.emulated.delay import EmulatedTime, sized_info
from epdd.worker.process.loop import Send, failed


class RowsEncoder:
    """An encoder without a model: it writes a pattern of true size, and answers in `submit`.

    Images are not decoded, so a file that is damaged behind its header is encoded like any other.
    """

    busy = False

    def __init__(self, folder: str, model: EmulatedModel, arena: Mapping | None, send: Send) -> None:
        if arena is None:
            raise WorkerFailed("an encoder needs the arena")
        self._arena, self._send = arena, send
        self._info, self._dtype = sized_info(folder, model), model.dtype

    def submit(self, message: wire.Encode, raw: bytes) -> None:
        """Write the rows and answer Encoded, or Failed if they do not fit."""
        try:
            size = self._size(message)
        except WorkerFailed as error:
            self._send(failed(message.id, error))
            return
        pattern.write(self._arena.view(wire.Lease(message.lease.offset, size)), wire.content_hash(raw))
        self._send(wire.Encoded(message.id, rows=message.rows, bytes=size, dtype=self._dtype, seconds=0.0))

    def warm_up(self, progress: Callable[[float], None]) -> wire.Ready:
        progress(1.0)
        return wire.Ready(binding=wire.Binding((), (), 1), dtype=self._dtype)

    def _size(self, message: wire.Encode) -> int:
        rows = self._info.rows(message.grid)
        if rows != message.rows:
            raise WorkerFailed(f"grid {message.grid} makes {rows} rows, not {message.rows}")
        self._arena.view(message.lease)     # raises if the lease lies outside
        size = self._info.embedding_bytes(rows, self._dtype)
        if size > message.lease.size:
            raise WorkerFailed(f"a lease of {message.lease.size} bytes does not hold {size}")
        return size


class EmulatedEncoder(EmulatedTime):
    """Delays the answers of a core: the demo model's encoder, or one that writes rows of true size."""

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping | None, send: Send,
                 wait: Callable[[float], None], clock: Clock | None = None) -> None:
        """Raises StartupError where the demo model cannot be loaded."""
        emulated = spec.emulated
        assert emulated is not None and isinstance(emulated.group, EncoderGroup)
        super().__init__(spec.name, emulated, send, wait, clock or Clock(emulated.scale))
        self._group = emulated.group
        self._answers: list[wire.FromWorker] = []
        if emulated.model is not None:
            self._core: Any = RowsEncoder(spec.model, emulated.model, arena, self._answers.append)
            self._patches_max = emulated.model.max_pixels // emulated.model.patch ** 2
        else:
            real = importlib.import_module("epdd.worker.vision.encoder").Encoder
            self._core = real(replace(spec, device="cpu"), arena, self._answers.append)
            info = families.load(spec.model)
            self._patches_max = info.rows_max * info.merge ** 2
        self._waiting: deque[tuple[wire.Encode, bytes, float]] = deque()     # with its arrival
        self._steps = 0

    def submit(self, message: wire.ToWorker, raw: bytes) -> None:
        """Queue an image.  Raises ProtocolError on another role's work."""
        if not isinstance(message, wire.Encode):
            raise ProtocolError(f"an encoder cannot do {type(message).__name__}")
        self._waiting.append((message, raw, self.clock.now()))

    def cancel(self, work_id: str) -> None:
        """Drop a waiting image; one that has begun is encoded to its end, as on a real device."""
        for job in self._waiting:
            if job[0].id == work_id:
                self._waiting.remove(job)
                self._send(wire.Cancelled(work_id))
                return

    @property
    def busy(self) -> bool:
        return self.computing or bool(self._waiting)

    def heartbeat(self) -> wire.Heartbeat:
        return wire.Heartbeat(steps=self._steps, running=int(self.computing), waiting=len(self._waiting))

    def warm_up(self, progress: Callable[[float], None]) -> wire.Ready:
        """The core's own; the samples are the profile's, and the emulated clock starts here."""
        ready: wire.Ready = self._core.warm_up(progress)
        samples = tuple((n, self.clock.real(s)) for n, s in self._group.samples(self._patches_max))
        self._answers.clear()
        self.clock.start()
        return msgspec.structs.replace(ready, samples=samples)

    def _begin(self) -> None:
        message, raw, arrived = self._waiting.popleft()
        self._core.submit(message, raw)
        while self._core.busy:
            self._core.step()
        (answer,) = self._answers
        self._answers.clear()
        self._steps += 1
        if not isinstance(answer, wire.Encoded):
            self._send(answer)      # a refusal takes no device time
            return
        seconds = self._spend(arrived, self._group.image_seconds(math.prod(message.grid)))
        self._delayed = [msgspec.structs.replace(answer, seconds=self.clock.real(seconds))]
