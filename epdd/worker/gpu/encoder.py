"""The encoder role on a GPU: files are decoded on CPU threads, all else is done on the device.

An image is answered when the stream is done with it: readers then need not wait.  That costs the time of a launch
between two batches, and saves an event for each lease, which would have to outlive its process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from epdd import wire
from epdd.arena import Mapping
from epdd.errors import DeviceError, OutOfMemory
from epdd.worker.gpu import pixels
from epdd.worker.gpu.transfer import Transfer
from epdd.worker.kernels import cuda
from epdd.worker.process.loop import Send
from epdd.worker.process.thread_name import name_thread
from epdd.worker.vision import backends
from epdd.worker.vision.decode_image import Pixels
from epdd.worker.vision.encoder import Encoder, ImageTask
from epdd.worker.vision.grids import Grid
from epdd.worker.vision.tower import Tower

log = logging.getLogger(__name__)

# Two images of 1080p: products reach their full rate long before, and the next image waits no longer than that.
BATCH_PATCHES_MAX = 16384
BATCH_SHARE = 0.7       # of the free memory: torch's allocator keeps blocks of other sizes in between


class GpuEncoder(Encoder):
    """The role; tests give another `device`."""

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping | None, send: Send,
                 device: cuda.Device | None = None) -> None:
        """Loads the weights.  Raises StartupError."""
        self._gpu = device or cuda.Device(spec.device)
        if spec.gpu_bytes:
            self._gpu.limit(spec.gpu_bytes)
        super().__init__(replace(spec, device=str(self._gpu.torch)), arena, send)
        self._helper = ThreadPoolExecutor(max(1, spec.threads), initializer=self._enter)
        self._transfer = Transfer(self._gpu, arena)
        self._pool = self._transfer.create_pool(spec.pool_bytes) if spec.pool_bytes else None
        self._stream = self._gpu.stream()       # not urgent: where MPS lets processes share a GPU, decoding goes first

    def _enter(self) -> None:
        name_thread("preprocess")
        self._gpu.enter()

    # --- the role

    @property
    def busy(self) -> bool:
        return super().busy or self._transfer.pinning

    def submit(self, message: wire.ToWorker, raw: bytes) -> None:
        """As of `Encoder`, and messages about arenas."""
        if not self._transfer.take(message, self._send):
            super().submit(message, raw)

    def step(self) -> None:
        """As of `Encoder`.  Raises DeviceError, after which the process must end."""
        self._transfer.go_on(self._send)
        with self._gpu.using(self._stream):
            super().step()

    def warm_up(self, progress: Callable[[float], None]) -> wire.Ready:
        """As on CPUs; then how many patches a batch may have."""
        with self._gpu.using(self._stream):
            ready = super().warm_up(progress)
            self.batch_patches = self._batch_patches(ready.samples[-1][0])
        log.info("%s batches of %d patches at most", self._spec.name, self.batch_patches)
        return msgspec.structs.replace(ready, pool=self._pool)

    def _batch_patches(self, patches: int) -> int:
        """From the memory that an image of `patches` patches takes, and the free memory."""
        self._gpu.empty_cache()
        held = self._gpu.held_bytes()
        there = self._spec.gpu_bytes - held if self._spec.gpu_bytes else self._gpu.memory()[0]
        self._gpu.reset_peak()
        image, grid = self._blank(patches)
        self.embed([image], [grid])
        self._wait()
        each = max(1.0, (self._gpu.peak_bytes() - held) / patches)
        return max(1, min(BATCH_PATCHES_MAX, int(BATCH_SHARE * there / each)))

    # --- parts of Encoder that differ on a GPU

    def _prepare(self, pixels: Pixels, grid: Grid) -> torch.Tensor:
        """Pinned bytes: [height, width, 3] if the tower's patches are cut on the device."""
        given = pixels if isinstance(self.tower, Tower) else self.tower.prepare(pixels, grid)
        return self._gpu.pinned(torch.from_numpy(np.require(given, requirements=("C", "W"))))

    def _blank(self, patches: int) -> tuple[torch.Tensor, Grid]:
        image, grid = self.tower.blank(patches)
        if isinstance(self.tower, Tower):
            return torch.zeros(grid[1] * self._info.patch, grid[2] * self._info.patch, 3, dtype=torch.uint8), grid
        return torch.from_numpy(image), grid

    def _wait(self) -> None:
        self._gpu.synchronise(self._stream)

    def embed(self, images: list[Any], grids: list[Grid]) -> backends.Planes:
        """Planes [rows, hidden] of all images from their pixels, on their way on the device."""
        parts = [image.to(self._gpu.torch, non_blocking=True) for image in images]
        if isinstance(self.tower, Tower):
            parts = [pixels.patches(part, grid, self._info) for part, grid in zip(parts, grids)]
        return self._run(parts[0] if len(parts) == 1 else torch.cat(parts), grids)

    def _check_lease(self, lease: wire.Lease) -> None:
        self._transfer.check(lease)

    def _write(self, message: wire.Encode, planes: backends.Planes) -> int:
        self._shape(message, planes)
        return self._transfer.store(torch.stack(planes), message.lease)

    # --- faults

    def _attempt(self, batch: list[tuple[ImageTask, Any]], start: float) -> Exception | None:
        problem = super()._attempt(batch, start)
        if problem is None:
            return None
        found = cuda.fault(problem)
        if isinstance(found, DeviceError):
            raise found
        problem = (found or problem).with_traceback(None)       # its frames hold tensors
        if isinstance(problem, OutOfMemory):
            log.warning("%s no memory for a batch of %d", self._spec.name, len(batch))
            self._gpu.empty_cache()
        return problem

    def _refuse(self, message: wire.Encode, problem: Exception) -> None:
        super()._refuse(message, problem)
        if isinstance(problem, OutOfMemory):    # the daemon retries the image once
            self._prove()

    def _prove(self) -> None:
        """Encode the smallest image, or end.  Raises DeviceError."""
        self._gpu.empty_cache()
        try:
            image, grid = self._blank(1)
            self.embed([image], [grid])
            self._wait()
        except Exception as error:
            raise DeviceError(f"after memory ran out nothing can be encoded: {cuda.fault(error) or error}") from None
