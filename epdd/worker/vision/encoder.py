"""The encoder role: image files in, embeddings written into leases.

Has only vision weights; `tower` and `backends` compute.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from epdd import families, wire
from epdd.arena import Mapping
from epdd.errors import ProtocolError, WorkerFailed
from epdd.worker.process.loop import Send, failed
from epdd.worker.process.thread_name import name_thread
from epdd.worker.vision import backends, decode_image
from epdd.worker.vision.backends import choice, plain, remembered
from epdd.worker.vision.grids import Grid
from epdd.worker.vision.inputs import INPUTS
from epdd.worker.vision.plain_tower import PlainTower
from epdd.worker.vision.tower import Tower
from epdd.worker.weights import load

# Together with others, small images fill the matrix products better: 1.2 times at 196 patches an image,
# 1.01 times at 784, so images beyond this many patches run alone.
BATCH_PATCHES_MAX = 1024
WARM_UP_S = 8.0                 # a size is not timed if it would likely end after this
WARM_UP_PATCHES = (16, 64, 256, 1024, 4096)
# After a larger image than this the C library returns freed memory to the system.  Otherwise it keeps the largest
# buffer of each thread.  Setting its thresholds instead would slow torch's own allocations down.
TRIM_PIXELS_MIN = 4_000_000
LIBC = ctypes.CDLL(None)        # its calls release the interpreter lock
CHOICE_SHARE = 0.4              # of the warm-up's progress: choosing the backend


@dataclass(frozen=True)
class ImageTask:
    """One image, which the helper thread decodes and cuts into patches."""

    message: wire.Encode
    patches: Future[Any]


class Encoder:
    """The role: one step encodes one large image or a few small ones."""

    batch_patches = BATCH_PATCHES_MAX

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping | None, send: Send) -> None:
        """Loads the weights.  Raises StartupError."""
        if arena is None:
            raise WorkerFailed("an encoder needs the arena")
        self._arena, self._send, self._spec = arena, send, spec
        self._info = families.load(spec.model)
        self.tower = self._load_tower(spec)
        self._run: backends.Run = self.tower
        self._waiting: deque[ImageTask] = deque()
        # The next image is prepared while this one is encoded; the decoders release the interpreter lock.
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
        self._waiting.append(ImageTask(message, self._helper.submit(self._decode, raw, message)))

    def cancel(self, work_id: str) -> None:
        """Drop a waiting image; one that is done has been answered already."""
        for job in self._waiting:
            if job.message.id == work_id:
                job.patches.cancel()
                self._waiting.remove(job)
                self._send(wire.Cancelled(work_id))
                return

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def heartbeat(self) -> wire.Heartbeat:
        return wire.Heartbeat(steps=self._steps, waiting=len(self._waiting))

    def step(self) -> None:
        """Encode the next image, and small ones behind it, and answer each."""
        start = time.monotonic()
        batch: list[tuple[ImageTask, Any]] = []
        total = 0
        while self._waiting:
            size = self._info.patches(self._waiting[0].message.grid)
            if batch and total + size > self.batch_patches:
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
        begin = time.monotonic()
        for i, wanted in enumerate(WARM_UP_PATCHES):
            image, grid = self._blank(wanted)
            n = self._info.patches(grid)
            if samples:
                # Cost grows a little faster than the patches, as attention's share does.
                expected = samples[-1][1] * 1.3 * n / samples[-1][0]
                if n <= samples[-1][0] or time.monotonic() - begin + expected > WARM_UP_S:
                    break
            for _ in range(2 if not samples else 1):
                start = time.monotonic()
                self.embed([image], [grid])
                self._wait()
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

    def _load_tower(self, spec: wire.WorkerSpec) -> Tower | PlainTower:
        family = families.at(spec.model)
        if family.fast_tower:
            return Tower(lambda: load.load_vision(spec.model, spec.dtype, spec.device), self._info)
        return PlainTower(lambda: load.load_vision_half(spec.model, spec.dtype, spec.device), self._info,
                          INPUTS[family.vision_input](self._info))

    def _decode(self, raw: bytes, message: wire.Encode) -> Any:
        """What `embed` takes of an image file, in the helper thread.  Raises MediaError."""
        try:
            return self._prepare(decode_image.decode(raw, message.size, message.orientation), message.grid)
        finally:
            if math.prod(message.size) >= TRIM_PIXELS_MIN:
                LIBC.malloc_trim(0)

    def _prepare(self, pixels: decode_image.Pixels, grid: Grid) -> Any:
        """The same of its pixels."""
        return self.tower.prepare(pixels, grid)

    def _blank(self, patches: int) -> tuple[Any, Grid]:
        """The same of a black square of about that many patches, and its grid."""
        return self.tower.blank(patches)

    def _wait(self) -> None:
        """Until all that was begun is done: at once on a CPU."""

    def embed(self, images: list[Any], grids: list[Grid]) -> backends.Planes:
        """Planes [rows, hidden] of all images, one after another, from their patches."""
        stacked = torch.from_numpy(images[0] if len(images) == 1 else np.concatenate(images))
        return self._run(stacked.to(self.tower.device), grids)

    def _choose(self, progress: Callable[[float], None]) -> choice.BackendChoice:
        if isinstance(self.tower, PlainTower):
            return plain.choose(self.tower)
        ways = choice.candidates(self.tower.device, self._spec.quantize)
        missing = {way.name: lacking for way in ways if (lacking := way.missing(self.tower))}
        facts = remembered.facts(self._spec, load.dtype_name(self.dtype), [way.name for way in ways], missing)
        return choice.choose(self.tower, ways, remembered.Memory(remembered.folder(), facts), progress)

    def _check(self, message: wire.Encode) -> None:
        rows = self._info.rows(message.grid)
        if rows != message.rows:
            raise WorkerFailed(f"grid {message.grid} makes {rows} rows, not {message.rows}")
        self._check_lease(message.lease)
        need = self._info.embedding_bytes(rows, load.dtype_name(self.dtype))
        if need > message.lease.size:
            raise WorkerFailed(f"a lease of {message.lease.size} bytes does not hold {need}")

    def _check_lease(self, lease: wire.Lease) -> None:
        """Raises WorkerFailed if it lies outside."""
        self._arena.view(lease)

    def _encode(self, batch: list[tuple[ImageTask, Any]], start: float) -> None:
        problem = self._attempt(batch, start)
        if problem is not None and len(batch) == 1:
            self._refuse(batch[0][0].message, problem)
        elif problem is not None:
            for item in batch:      # a fault of one image must not fail the others
                self._encode([item], time.monotonic())

    def _refuse(self, message: wire.Encode, problem: Exception) -> None:
        self._send(failed(message.id, problem))

    def _attempt(self, batch: list[tuple[ImageTask, Any]], start: float) -> Exception | None:
        """Encode a batch and answer its images, or answer none and return the error."""
        messages = [job.message for job, _ in batch]
        try:
            planes = self.embed([image for _, image in batch], [message.grid for message in messages])
            written, first = [], 0
            for message in messages:
                written.append(self._write(message, [plane[first:first + message.rows] for plane in planes]))
                first += message.rows
            self._wait()
        except Exception as error:
            return error
        # Each answer has its image's share of the seconds: the daemon's time models are per image.
        patches = [self._info.patches(message.grid) for message in messages]
        per_patch = (time.monotonic() - start) / sum(patches)
        for message, size, count in zip(messages, written, patches):
            self._steps += 1
            self._send(wire.Encoded(message.id, rows=message.rows, bytes=size, dtype=load.dtype_name(self.dtype),
                                    seconds=per_patch * count))
        return None

    def _write(self, message: wire.Encode, planes: backends.Planes) -> int:
        """Each plane's rows, copied to their place in the lease; the number of bytes."""
        shape = self._shape(message, planes)
        view = self._arena.view(message.lease)
        # Invariant: the arena's mapping lives as long as the process, for this tensor does not hold it.
        target = torch.frombuffer(view, dtype=self.dtype, count=math.prod(shape)).view(shape)
        for place, plane in zip(target, planes):
            place.copy_(plane)
        return int(target.nbytes)

    def _shape(self, message: wire.Encode, planes: backends.Planes) -> tuple[int, int, int]:
        """[planes, rows, hidden].  Raises WorkerFailed if the tower made something else."""
        shape = (self._info.planes, message.rows, self._info.hidden)
        if len(planes) != shape[0] or any(plane.shape != shape[1:] for plane in planes):
            raise WorkerFailed(f"the tower made {[tuple(plane.shape) for plane in planes]}, not {message.rows} rows")
        return shape
