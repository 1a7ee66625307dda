from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from epdd import arena, families, wire
from epdd.errors import ProtocolError
from epdd.worker.vision import encoder, preprocess, tower
from tests.models import checkpoints
from tests.worker.language import pd

SIZES = [(100, 60), (56, 56), (300, 40), (22, 3), (333, 251), (120, 200)]


class Bench:
    """An encoder and its arena; leases are taken one after another."""

    def __init__(self, folder: str, **options: Any) -> None:
        self.family = families.load(folder)
        self.mapping = arena.Mapping(arena.create(pd.ARENA_BYTES), pd.ARENA_BYTES)
        self.sent: list[wire.FromWorker] = []
        self.encoder = encoder.Encoder(pd.spec(folder, "encoder", **options), self.mapping, self.sent.append)
        self._at = 0

    def submit(self, work_id: str, image: Image.Image, data: bytes | None = None, rows_more: int = 0) -> wire.Lease:
        grid = self.family.grid(*image.size)
        rows = self.family.rows(grid)
        lease = wire.Lease(self._at, self.family.embedding_bytes(rows))
        self._at += lease.size
        file = io.BytesIO()
        image.save(file, "PNG")
        self.encoder.submit(wire.Encode(work_id, lease, grid, rows + rows_more, image.size),
                            file.getvalue() if data is None else data)
        return lease

    def run(self) -> None:
        while self.encoder.busy:
            self.encoder.step()

    def read(self, lease: wire.Lease, dtype: torch.dtype = torch.float32, count: int = -1) -> torch.Tensor:
        return torch.frombuffer(self.mapping.view(lease), dtype=dtype, count=count).view(
            self.family.planes, -1, self.family.hidden)


@pytest.mark.parametrize("family", checkpoints.TOWERS)
def test_embeddings_equal_the_untouched_tower(checkpoint: Callable[..., str], family: str) -> None:
    folder = checkpoint(family)
    bench = Bench(folder)
    images = [checkpoints.picture(*size, seed=i) for i, size in enumerate(SIZES)]
    leases = [bench.submit(str(i), image) for i, image in enumerate(images)]
    bench.run()
    for i, (image, lease) in enumerate(zip(images, leases)):
        wanted, _ = pd.embed(folder, image)
        torch.testing.assert_close(bench.read(lease), wanted, atol=2e-4, rtol=1e-4)
        message = bench.sent[i]
        assert isinstance(message, wire.Encoded)
        assert (message.id, message.rows, message.bytes, message.dtype) == (
            str(i), wanted.shape[1], wanted.nbytes, "float32")


@pytest.mark.parametrize("family", checkpoints.TOWERS)
def test_the_folded_patch_embedding_equals_the_convolution(checkpoint: Callable[..., str], family: str) -> None:
    folder = checkpoint(family)
    facts = families.load(folder)
    untouched = checkpoints.whole_model(folder).model.visual.patch_embed
    folded = tower.FoldedPatchEmbed(untouched.proj, facts.mean, facts.std)
    image = checkpoints.picture(300, 200)
    values, _ = checkpoints.pixel_values(folder, [image])
    raw = preprocess.patches(np.asarray(image), facts, facts.grid(300, 200))
    with torch.inference_mode():
        wanted = untouched(values)
        assert (folded(torch.from_numpy(raw)) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_small_images_share_a_step_and_large_ones_do_not(checkpoint: Callable[..., str]) -> None:
    bench = Bench(checkpoint("qwen3_vl"))
    bench.encoder.batch_patches = 100
    for i, size in enumerate([(56, 56), (100, 60), (56, 56), (333, 251), (56, 56)]):
        bench.submit(str(i), checkpoints.picture(*size))
    done = []
    while bench.encoder.busy:
        bench.encoder.step()
        done.append(len(bench.sent))
    assert done == [3, 4, 5]


def test_faults_are_told_by_code_and_hit_their_image_only(checkpoint: Callable[..., str]) -> None:
    bench = Bench(checkpoint("qwen3_vl"))
    good = checkpoints.picture(100, 60)
    file = io.BytesIO()
    good.save(file, "JPEG")
    bench.submit("cut", good, file.getvalue()[:-20])
    bench.submit("text", good, b"hello")
    bench.submit("empty", good, b"")
    bench.submit("rows", good, rows_more=1)
    bench.submit("shape", checkpoints.picture(60, 100), file.getvalue())
    lease = bench.submit("good", good)
    bench.encoder.submit(wire.Encode("small", wire.Lease(0, 100), bench.family.grid(100, 60), bench.family.rows(
        bench.family.grid(100, 60)), (100, 60)), file.getvalue())
    bench.encoder.submit(wire.Encode("far", wire.Lease(pd.ARENA_BYTES, lease.size), bench.family.grid(100, 60),
                                     bench.family.rows(bench.family.grid(100, 60)), (100, 60)), file.getvalue())
    bench.run()
    codes = {m.id: m.code for m in bench.sent if isinstance(m, wire.Failed)}
    assert codes == {"cut": "image_parse_error", "text": "invalid_image_format", "empty": "invalid_image_format",
                     "rows": "worker_failed", "shape": "image_parse_error", "small": "worker_failed",
                     "far": "worker_failed"}
    assert [m.id for m in bench.sent if isinstance(m, wire.Encoded)] == ["good"]
    assert len(bench.sent) == 8


def test_a_fault_of_a_batch_is_traced_to_its_image(checkpoint: Callable[..., str],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(checkpoint("qwen3_vl"))
    embed = bench.encoder.embed

    def faulty(images: list[np.ndarray[Any, Any]], grids: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        if (1, 4, 6) in grids:
            raise RuntimeError("secret path /root")
        return embed(images, grids)

    monkeypatch.setattr(bench.encoder, "embed", faulty)
    for name, size in (("a", (64, 64)), ("b", (96, 64)), ("c", (64, 64))):
        bench.submit(name, checkpoints.picture(*size))
    bench.run()
    assert [(type(m), m.id) for m in bench.sent] == [  # type: ignore[union-attr]
        (wire.Encoded, "a"), (wire.Failed, "b"), (wire.Encoded, "c")]
    assert bench.sent[1] == wire.Failed("b", "internal_error", "the worker failed on this request")


def test_cancel_answers_for_waiting_images_only(checkpoint: Callable[..., str]) -> None:
    bench = Bench(checkpoint("qwen3_vl"))
    for name in ("a", "b"):
        bench.submit(name, checkpoints.picture(333, 251))
    bench.encoder.cancel("b")
    bench.run()
    bench.encoder.cancel("a")
    bench.encoder.cancel("unknown")
    assert [type(m) for m in bench.sent] == [wire.Cancelled, wire.Encoded]
    with pytest.raises(ProtocolError):
        bench.encoder.submit(wire.Generate("x", (), wire.Sampling(max_tokens=1)), b"")


def test_bfloat16_weights_write_bfloat16(checkpoint: Callable[..., str]) -> None:
    bench = Bench(checkpoint("qwen3_vl", dtype="bfloat16"), dtype="bfloat16")
    image = checkpoints.picture(100, 60)
    lease = bench.submit("x", image)
    bench.run()
    message = bench.sent[0]
    assert isinstance(message, wire.Encoded) and message.dtype == "bfloat16" and message.bytes == lease.size // 2
    found = bench.read(wire.Lease(lease.offset, message.bytes), torch.bfloat16).float()
    wanted, _ = pd.embed(checkpoint("qwen3_vl", dtype="bfloat16"), image)
    assert torch.nn.functional.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) > 0.99


def test_warm_up_measures_growing_sizes(checkpoint: Callable[..., str]) -> None:
    bench = Bench(checkpoint("qwen3_vl"))
    told: list[float] = []
    ready = bench.encoder.warm_up(told.append)
    assert len(ready.samples) >= 3 and told == sorted(told)
    assert [patches for patches, _ in ready.samples] == sorted({patches for patches, _ in ready.samples})
    assert all(seconds > 0 for _, seconds in ready.samples)
    assert ready.samples[-1][0] <= bench.family.rows_max * 4
    assert not bench.sent and bench.encoder.heartbeat() == wire.Heartbeat(steps=0)
    assert ready.backend in {trial.backend for trial in ready.trials if not trial.note}
    assert [trial.backend for trial in ready.trials] == ["torch", "prepacked", "amx", "ipex"]


@pytest.mark.parametrize("quantize", ["", "int8"])
def test_after_the_warm_up_embeddings_are_the_same_or_near(checkpoint: Callable[..., str], quantize: str) -> None:
    folder = checkpoint("qwen3_vl")
    bench = Bench(folder, quantize=quantize)
    ready = bench.encoder.warm_up(lambda done: None)
    assert ("int8" in {trial.backend for trial in ready.trials}) == (quantize == "int8")
    image = checkpoints.picture(333, 251)
    lease = bench.submit("x", image)
    bench.run()
    wanted, _ = pd.embed(folder, image)
    if ready.backend == "int8":
        assert torch.nn.functional.cosine_similarity(bench.read(lease), wanted, dim=-1).mean() > 0.99
    else:
        torch.testing.assert_close(bench.read(lease), wanted, atol=2e-4, rtol=1e-4)
