"""The GPU encoder on the fake device: embeddings in place when answered, and the effects of CUDA errors."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from epdd import arena, families, wire
from epdd.errors import DeviceError
from epdd.worker.gpu import pixels
from epdd.worker.gpu.encoder import GpuEncoder
from epdd.worker.vision import preprocess
from epdd.worker.vision.backends import choice, cuda
from epdd.worker.vision.backends.cuda import Flash
from epdd.worker.vision.tower import Tower
from tests.models import checkpoints
from tests.worker.fake_cuda import FakeDevice
from tests.worker.language import pd

SIZES = [(100, 60), (56, 56), (300, 40), (333, 251)]
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Bench:
    """An encoder with its arena and its GPU's pool, which is arena 1."""

    def __init__(self, folder: str, **options: Any) -> None:
        self.family = families.load(folder)
        self.mapping = arena.Mapping(arena.create(pd.ARENA_BYTES), pd.ARENA_BYTES)
        self.sent: list[wire.FromWorker] = []
        self.device = FakeDevice()
        self.encoder = GpuEncoder(pd.spec(folder, "encoder", device="cuda:0", pool_bytes=1 << 22, **options),
                                  self.mapping, self.sent.append, self.device)
        self.reader = FakeDevice(process=1)
        self._at = 0

    def submit(self, work_id: str, image: Image.Image, number: int = 0) -> wire.Lease:
        grid = self.family.grid(*image.size)
        rows = self.family.rows(grid)
        lease = wire.Lease(self._at, self.family.embedding_bytes(rows), number)
        self._at += lease.size
        file = io.BytesIO()
        image.save(file, "PNG")
        self.encoder.submit(wire.Encode(work_id, lease, grid, rows, image.size), file.getvalue())
        return lease

    def run(self) -> None:
        while self.encoder.busy:
            self.encoder.step()

    def read(self, lease: wire.Lease) -> torch.Tensor:
        if lease.arena:
            base = self.reader.open(bytes.fromhex(self.encoder._pool.handle))
            memory = np.frombuffer(self.reader._regions[base][0], np.float32, lease.size // 4, lease.offset)
            flat = torch.from_numpy(memory.copy())
        else:
            flat = torch.frombuffer(self.mapping.view(lease), dtype=torch.float32)
        return flat.view(self.family.planes, -1, self.family.hidden)

    def codes(self) -> dict[str, str]:
        return {m.id: m.code if isinstance(m, wire.Failed) else "" for m in self.sent
                if isinstance(m, (wire.Failed, wire.Encoded))}


@pytest.fixture
def bench(checkpoint: Callable[..., str]) -> Bench:
    return Bench(checkpoint("qwen3_vl"))


@pytest.mark.parametrize("number", [0, 1])
def test_rows_lie_in_the_lease_when_it_is_told(checkpoint: Callable[..., str], number: int) -> None:
    folder = checkpoint("qwen3_vl")
    bench = Bench(folder)
    images = [checkpoints.picture(*size, seed=i) for i, size in enumerate(SIZES)]
    leases = [bench.submit(str(i), image, number) for i, image in enumerate(images)]
    bench.encoder.step()        # all in one
    assert bench.codes() == {str(i): "" for i in range(len(SIZES))}
    for image, lease in zip(images, leases):
        wanted, _ = pd.embed(folder, image)
        # A grey level here and there between Pillow's resizing and torch's.
        assert (bench.read(lease) - wanted).norm() < 5e-3 * wanted.norm()


def test_warm_up_bounds_batches_by_memory(bench: Bench) -> None:
    bench.device.peak = 4096 * (1 << 20)
    ready = bench.encoder.warm_up(lambda done: None)
    largest = ready.samples[-1][0]
    free = bench.device.memory()[0]
    assert bench.encoder.batch_patches == int(0.7 * free / (bench.device.peak / largest))
    assert ready.pool is not None and ready.pool.bytes == 1 << 22 and ready.dtype == "float32"
    for i in range(3):
        bench.submit(str(i), checkpoints.picture(*SIZES[i]))
    bench.encoder.batch_patches = 1
    bench.encoder.step()
    assert len(bench.codes()) == 1


def test_the_arena_is_pinned_between_steps(bench: Bench) -> None:
    bench.encoder.submit(wire.OpenArena(0), b"")
    bench.run()
    assert bench.sent == [wire.Opened(0)] and bench.device.registered


def test_leases_outside_are_refused(bench: Bench) -> None:
    image = checkpoints.picture(56, 56)
    grid = bench.family.grid(*image.size)
    for lease in (wire.Lease(1 << 22, 1 << 20, 1), wire.Lease(pd.ARENA_BYTES, 1 << 20)):
        bench.encoder.submit(wire.Encode(f"{lease.arena}", lease, grid, bench.family.rows(grid), image.size), b"")
    assert bench.codes() == {"0": "worker_failed", "1": "worker_failed"}


def test_a_batch_without_memory_is_tried_one_by_one(bench: Bench) -> None:
    for i, size in enumerate(SIZES):
        bench.submit(str(i), checkpoints.picture(*size))
    bench.device.inject("synchronise", NO_MEMORY)
    bench.run()
    assert bench.codes() == {str(i): "" for i in range(4)} and bench.device.emptied == 1


def test_an_image_that_does_not_fit_alone_either_fails_alone_and_the_worker_proves_itself(bench: Bench) -> None:
    for i, size in enumerate(SIZES):
        bench.submit(str(i), checkpoints.picture(*size))
    bench.device.inject("synchronise", NO_MEMORY, None, NO_MEMORY, None, None, None)
    bench.run()
    assert bench.codes() == {"0": "", "1": "out_of_memory", "2": "", "3": ""}
    bench.submit("next", checkpoints.picture(56, 56))
    bench.run()
    assert bench.codes()["next"] == ""


def test_an_only_image_is_told_at_once(bench: Bench) -> None:
    """The daemon retries it once, alone, possibly on another encoder."""
    bench.submit("0", checkpoints.picture(56, 56))
    bench.device.inject("synchronise", NO_MEMORY)
    bench.run()
    assert bench.codes() == {"0": "out_of_memory"} and bench.device.emptied == 2


def test_a_worker_that_cannot_even_encode_the_smallest_ends(bench: Bench) -> None:
    bench.submit("0", checkpoints.picture(56, 56))
    bench.device.inject("synchronise", NO_MEMORY, NO_MEMORY)
    with pytest.raises(DeviceError, match="after memory ran out nothing can be encoded"):
        bench.run()
    assert bench.codes() == {"0": "out_of_memory"}


@pytest.mark.parametrize("call", ["synchronise", "copy"])
def test_any_other_error_of_the_device_ends_the_worker(bench: Bench, call: str) -> None:
    bench.submit("0", checkpoints.picture(56, 56))
    bench.submit("1", checkpoints.picture(56, 56))
    bench.device.inject(call, torch.AcceleratorError("CUDA error: device-side assert triggered"))
    with pytest.raises(DeviceError, match="device-side assert"):
        bench.run()
    assert bench.codes() == {}      # the daemon places both again


def test_faults_of_an_image_hit_it_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(3):
        bench.submit(str(i), checkpoints.picture(56, 56))
    write = bench.encoder._write
    monkeypatch.setattr(bench.encoder, "_write", lambda message, planes: 1 / 0 if message.id == "1" else write(
        message, planes))
    bench.run()
    assert bench.codes() == {"0": "", "1": "internal_error", "2": ""}


@pytest.mark.parametrize("size, target", [((640, 360), (224, 384)), ((97, 131), (160, 96)), ((64, 64), (128, 64)),
                                          ((1000, 20), (32, 960))])
def test_resizing_is_pillows_but_for_rare_grey_levels(size: tuple[int, int], target: tuple[int, int]) -> None:
    data = np.asarray(checkpoints.picture(*size))
    wanted = preprocess.resize(data, *target)
    found = pixels.resize(torch.from_numpy(data.copy()), *target).numpy()
    off = np.abs(found.astype(int) - wanted.astype(int))
    assert off.max() <= 1 and (off > 0).mean() < 1e-3


def test_patches_are_cut_as_on_cpus(bench: Bench) -> None:
    family = bench.family
    data = np.asarray(checkpoints.picture(family.patch * family.merge * 3, family.patch * family.merge * 2))
    found = pixels.cut(torch.from_numpy(data.copy()), family)
    assert np.array_equal(found.numpy(), preprocess.cut(data, family))


def test_packed_attention_is_told_who_belongs_together(checkpoint: Callable[..., str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel needs a GPU: here a function of its arguments replaces it."""
    def by_bounds(scale: float, query: Any, key: Any, value: Any, segments: Any) -> torch.Tensor:
        assert segments.bounds.dtype == torch.int32 and segments.longest == max(segments.lengths)
        parts = []
        for low, high in zip(segments.bounds.tolist(), segments.bounds.tolist()[1:]):
            q, k, v = (x[low:high].transpose(0, 1)[None] for x in (query, key, value))
            parts.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(cuda, "_flash", by_bounds)
    for family in checkpoints.TOWERS:
        folder = checkpoint(family)
        facts = families.load(folder)
        from epdd.worker.weights import load
        plain, packed = (Tower(lambda: load.load_vision(folder, "float32", "cpu"), facts) for _ in range(2))
        grids = [(1, 4, 6), (1, 2, 2), (1, 6, 4)]
        data = torch.randint(0, 256, (52, 3 * facts.patch ** 2), dtype=torch.uint8)
        found, wanted = Flash().prepare(packed)(data, grids), plain(data, grids)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, wanted, strict=True))
        assert Flash().missing(plain) == "for GPUs only"


def test_what_is_tried_on_which_device() -> None:
    assert [way.name for way in choice.candidates(torch.device("cuda:0"), "")] == ["torch", "flash", "varlen_attn"]
    schema = torch.ops.aten._flash_attention_forward.default._schema
    assert [argument.name for argument in schema.arguments][:11] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "return_debug_mask", "scale"]
