"""The GPU's engine on a device of host memory whose copies come as late as they may, with a kernel of plain torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from epdd import wire
from epdd.errors import DeviceError
from epdd.worker.gpu import flash, graphs
from epdd.worker.gpu.runner import GpuModelRunner
from tests.models import checkpoints
from tests.worker.fake_cuda import FakeDevice
from tests.worker.language import pd
from tests.worker.language.test_engine import prompts, reference

KERNELS: dict[str, flash.Kernel] = {"by sequence": flash.by_sequence}


def bench(folder: str, device: FakeDevice | None = None, kernels: dict[str, flash.Kernel] = KERNELS, warm: bool = True,
          **options: Any) -> pd.Bench:
    device = device or FakeDevice()
    made = pd.Bench(folder, make=partial(GpuModelRunner, device=device, kernels=kernels),  # type: ignore[arg-type]
                    **({"max_sequences": 8} | options))
    if warm:
        made.engine.warm_up(lambda done: None)
    return made


def sizes_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of sequences of decode steps that graphs computed."""
    sizes: list[int] = []
    run = graphs.Graphs.run

    def noted(self: graphs.Graphs, ids: list[int], positions: torch.Tensor,
              layout: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(ids))
        return run(self, ids, positions, layout)

    monkeypatch.setattr(graphs.Graphs, "run", noted)
    return sizes


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_the_same_tokens_as_on_cpus(checkpoint: Callable[..., str], family: str,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(family)
    sizes = sizes_run(monkeypatch)
    ours, theirs = bench(folder, max_batched_tokens=64), pd.Bench(folder)
    for name, prompt in prompts(folder, 8).items():
        for each in (ours, theirs):
            each.submit(name, prompt, max_tokens=12 + 3 * int(name), ignore_eos=True)
    assert ours.run() == theirs.run()
    assert max(sizes) == 8 and len(sizes) > 12 and len(set(sizes)) > 3
    assert ours.engine.heartbeat().kv_used == 0


def test_preempted_and_sampled_requests_answer_the_same_without_their_leases(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    ours, theirs = bench(folder, headroom=1, kv_tokens=512, max_batched_tokens=48), pd.Bench(folder)
    leases = {}
    for name, prompt in prompts(folder, 12).items():
        if len(prompt.tokens) < 250:
            more = {"temperature": 1.0, "seed": int(name)} if int(name) % 3 == 0 else {}
            leases[name] = ours.submit(name, prompt, max_tokens=60, ignore_eos=True, **more)
            theirs.submit(name, prompt, max_tokens=60, ignore_eos=True, **more)
    told = 0
    while ours.engine.busy:
        ours.engine.step()
        for message in ours.sent[told:]:
            if isinstance(message, wire.Prefilled):
                ours.scribble(leases[message.id])
        told = len(ours.sent)
    assert ours.engine.heartbeat().preempted > 3
    assert ours.run() == theirs.run()


def test_without_a_kernel_each_sequence_is_attended_to_alone(checkpoint: Callable[..., str],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("qwen3_vl")
    sizes = sizes_run(monkeypatch)
    ours, theirs = bench(folder, kernels={}), pd.Bench(folder)
    for name, prompt in prompts(folder, 3).items():
        ours.submit(name, prompt)
        theirs.submit(name, prompt)
    assert ours.run() == theirs.run() and not sizes


def test_a_step_copies_ahead_and_waits_before_it_lets_go(checkpoint: Callable[..., str]) -> None:
    """A cancelled request's copies are done before its Cancelled: its lease may be overwritten at once."""
    folder = checkpoint("qwen3_vl")
    device = FakeDevice()
    ours = bench(folder, device, max_batched_tokens=16)
    ours.submit("x", prompts(folder, 6)["5"])
    for _ in range(3):
        ours.engine.step()
    assert any(stream.pending for stream in device._streams)        # the next chunk's rows
    ours.engine.cancel("x")
    assert not any(stream.pending for stream in device._streams)
    assert isinstance(ours.of("x")[-1], wire.Cancelled)


def test_a_fault_of_the_device_ends_the_worker_and_memory_that_ran_out_a_batch(
        checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("qwen3_vl")
    ours = bench(folder)

    def fail(text: str) -> Callable[..., torch.Tensor]:
        def hidden(*args: object, **more: object) -> torch.Tensor:
            raise RuntimeError(text)
        return hidden

    ours.submit("a", prompts(folder, 1)["0"])
    with monkeypatch.context() as patched:
        patched.setattr(ours.runner.language, "hidden", fail("CUDA error: out of memory"))
        ours.engine.step()
    last = ours.of("a")[-1]
    assert isinstance(last, wire.Failed) and last.code == "out_of_memory"
    ours.submit("b", prompts(folder, 1)["0"])
    with monkeypatch.context() as patched:
        patched.setattr(ours.runner.language, "hidden", fail("CUDA error: an illegal memory access was encountered"))
        with pytest.raises(DeviceError):
            ours.engine.step()


def test_images_are_read_from_an_encoders_memory_until_that_is_lost(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    owner, ours = FakeDevice(process=1), bench(folder, max_batched_tokens=16)
    prompt = prompts(folder, 2)["1"]
    embedding, grid = pd.embed(folder, prompt.images[0])
    address = owner.allocate(1 << 20)
    ctypes.memmove(address + 4096, embedding.data_ptr(), embedding.nbytes)
    ours.engine.submit(wire.OpenArena(1, wire.GpuPool(owner.export(address).hex(), 1 << 20)), b"")
    assert ours.sent == [wire.Opened(1)]
    lease = wire.Lease(4096, embedding.nbytes, arena=1)
    span = wire.Span(prompt.starts[0], embedding.shape[1], grid, lease, "float32", "")
    raw = np.array(prompt.tokens, np.int32).tobytes()
    for name in ("read", "lost"):
        ours.engine.submit(wire.Generate(name, (span,), wire.Sampling(max_tokens=12, temperature=0.0)), raw)
        if name == "read":
            assert ours.run()["read"] == reference(folder, prompt)
    ours.submit("text", prompts(folder, 1)["0"])
    ours.engine.submit(wire.CloseArena(1), b"")
    last = ours.of("lost")[-1]
    assert isinstance(last, wire.Failed) and last.code == "worker_lost"
    assert ours.run()["text"] == reference(folder, prompts(folder, 1)["0"])
    ours.engine.submit(wire.Generate("late", (span,), wire.Sampling(max_tokens=1)), raw)
    last = ours.of("late")[-1]
    assert isinstance(last, wire.Failed) and last.code == "worker_failed"


def test_the_host_arena_is_pinned_between_steps(checkpoint: Callable[..., str]) -> None:
    device = FakeDevice()
    ours = bench(checkpoint("qwen3_vl"), device)
    ours.engine.submit(wire.OpenArena(0, None), b"")
    assert ours.engine.busy
    while ours.engine.busy:
        ours.engine.step()
    assert ours.sent == [wire.Opened(0)]
    assert sum(size for _, size in device.registered) == pd.ARENA_BYTES
