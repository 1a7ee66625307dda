"""The encoder role: image files in, embeddings written into leases.

Holds only vision weights.  How they are computed with is a matter of `tower` and `backends`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from epdd import families, wire
from epdd.arena import Mapping
from epdd.errors import ProtocolError, WorkerFailed
from epdd.worker import backends, load, preprocess
from epdd.worker.backends import choice, remembered
from epdd.worker.bootstrap import name_thread
from epdd.worker.loop import Send, failed
from epdd.worker.tower import Tower

# Together with others, small images fill the matrix products better: 1.2 times at 196 patches an image,
# 1.01 times at 784, so images beyond this many patches run alone.
BATCH_PATCHES_MAX = 1024
WARM_UP_S = 8.0                 # a size is not timed if it would likely end after this
WARM_UP_PATCHES = (16, 64, 256, 1024, 4096)
CHOICE_SHARE = 0.4              # of the warm-up's progress: choosing the backend


@dataclass(frozen=True)
class Job:
    """One image with its reply's address, being decoded and cut into patches by the helper thread."""

    message: wire.Encode
    patches: Future[NDArray[np.uint8]]


class Encoder:
    """The role: one step encodes one large image or a few small ones."""

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping | None, send: Send) -> None:
        """Loads the weights.  Raises StartupError."""
        if arena is None:
            raise WorkerFailed("an encoder needs the arena")
        self._arena, self._send, self._spec = arena, send, spec
        self._family = families.load(spec.model)
        self.tower = Tower(lambda: load.load_vision(spec.model, spec.dtype, spec.device), self._family)
        self._run: backends.Run = self.tower
        self._waiting: deque[Job] = deque()
        # The next image is prepared while this one is encoded; the decoders let go of the interpreter lock.
        self._helper = ThreadPoolExecutor(1, initializer=name_thread, initargs=("preprocess",))
        self._steps = 0

    def submit(self, message: wire.ToWorker, raw: bytes) -> None:
        """Queue an image, or answer Failed if it cannot fit.  Raises ProtocolError on another role's work."""
        if not isinstance(message, wire.Encode):
            raise ProtocolError(f"an encoder cannot do {type(message).__name__}")
        try:
            self._check(message)
        except WorkerFailed as error:
            self._send(failed(message.id, error))
            return
        self._waiting.append(Job(message, self._helper.submit(preprocess.patches, raw, self._family, message.grid)))

    def cancel(self, work_id: str) -> None:
        """Drop an image that waits; one that is done has been answered already."""
        for job in self._waiting:
            if job.message.id == work_id:
                job.patches.cancel()
                self._waiting.remove(job)
                self._send(wire.Cancelled(work_id))
                return

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def beat(self) -> wire.Beat:
        return wire.Beat(steps=self._steps, waiting=len(self._waiting))

    def step(self) -> None:
        """Encode the next image, and small ones behind it, and answer each."""
        start = time.monotonic()
        batch: list[tuple[Job, NDArray[np.uint8]]] = []
        total = 0
        while self._waiting:
            size = math.prod(self._waiting[0].message.grid)
            if batch and total + size > BATCH_PATCHES_MAX:
                break
            job = self._waiting.popleft()
            try:
                batch.append((job, job.patches.result()))
                total += size
            except Exception as error:
                self._send(failed(job.message.id, error))
        if batch:
            self._encode(batch, start)

    def warm_up(self, progress: Callable[[float], None]) -> wire.Ready:
        """Choose the backend, then time a few image sizes: what the daemon's time model starts from.

        The first run is not counted.
        """
        chosen = self._choose(lambda done: progress(CHOICE_SHARE * done))
        self._run = chosen.run
        samples: list[tuple[int, float]] = []
        factor, patches_max = self._family.merge, self._family.rows_max * self._family.merge ** 2
        begin = time.monotonic()
        for i, wanted in enumerate(WARM_UP_PATCHES):
            side = max(1, math.isqrt(min(wanted, patches_max)) // factor) * factor
            n = side * side
            if samples:
                # Cost grows a little faster than the patches, as attention's share does.
                expected = samples[-1][1] * 1.3 * n / samples[-1][0]
                if n <= samples[-1][0] or time.monotonic() - begin + expected > WARM_UP_S:
                    break
            blank = np.zeros((n, 3 * self._family.patch ** 2), np.uint8)
            for _ in range(2 if not samples else 1):
                start = time.monotonic()
                self.embed([blank], [(1, side, side)])
                seconds = time.monotonic() - start
            samples.append((n, seconds))
            progress(CHOICE_SHARE + (1 - CHOICE_SHARE) * (i + 1) / len(WARM_UP_PATCHES))
        return wire.Ready(binding=wire.Binding((), (), torch.get_num_threads()), dtype=load.dtype_name(self.dtype),
                          samples=tuple(samples), parameters=self.tower.parameters,
                          backend=chosen.name, trials=chosen.trials)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the embeddings."""
        return self.tower.dtype

    def embed(self, images: list[NDArray[np.uint8]], grids: list[tuple[int, int, int]]) -> backends.Planes:
        """Planes [rows, hidden] of all images, one after another, from their patches."""
        stacked = torch.from_numpy(images[0] if len(images) == 1 else np.concatenate(images))
        return self._run(stacked.to(self.tower.device), grids)

    def _choose(self, progress: Callable[[float], None]) -> choice.Choice:
        ways = choice.candidates(self.tower.device, self._spec.quantize)
        missing = {way.name: lacking for way in ways if (lacking := way.missing(self.tower))}
        facts = remembered.facts(self._spec, load.dtype_name(self.dtype), [way.name for way in ways], missing)
        return choice.choose(self.tower, ways, remembered.Memory(remembered.folder(), facts), progress)

    def _check(self, message: wire.Encode) -> None:
        rows = self._family.rows(message.grid)
        if rows != message.rows:
            raise WorkerFailed(f"grid {message.grid} makes {rows} rows, not {message.rows}")
        self._arena.view(message.lease)     # raises where the lease lies outside
        need = self._family.embedding_bytes(rows, load.dtype_name(self.dtype))
        if need > message.lease.size:
            raise WorkerFailed(f"a lease of {message.lease.size} bytes does not hold {need}")

    def _encode(self, batch: list[tuple[Job, NDArray[np.uint8]]], start: float) -> None:
        try:
            planes = self.embed([data for _, data in batch], [job.message.grid for job, _ in batch])
        except Exception as error:
            if len(batch) == 1:
                self._send(failed(batch[0][0].message.id, error))
                return
            for item in batch:      # the innocent must not fail with the culprit
                self._encode([item], time.monotonic())
            return
        # Each image is told its share of the step: the daemon's time models are per image.
        per_patch = (time.monotonic() - start) / sum(len(patches) for _, patches in batch)
        first = 0
        for job, patches in batch:
            self._steps += 1
            self._answer(job.message, [plane[first:first + job.message.rows] for plane in planes],
                         per_patch * len(patches))
            first += job.message.rows

    def _answer(self, message: wire.Encode, planes: backends.Planes, seconds: float) -> None:
        try:
            written = self._write(message, planes)
        except Exception as error:
            self._send(failed(message.id, error))
            return
        self._send(wire.Encoded(message.id, rows=message.rows, bytes=written,
                                dtype=load.dtype_name(self.dtype), seconds=seconds))

    def _write(self, message: wire.Encode, planes: backends.Planes) -> int:
        """Each plane's rows, copied to their place in the lease; the number of bytes."""
        shape = (self._family.planes, message.rows, self._family.hidden)
        if len(planes) != shape[0] or any(plane.shape != shape[1:] for plane in planes):
            raise WorkerFailed(f"the tower made {[tuple(plane.shape) for plane in planes]}, not {message.rows} rows")
        view = self._arena.view(message.lease)
        # Invariant: the arena's mapping lives as long as the process, for this tensor does not hold it.
        target = torch.frombuffer(view, dtype=self.dtype, count=math.prod(shape)).view(shape)
        for place, plane in zip(target, planes):
            place.copy_(plane)
        return int(target.nbytes)
