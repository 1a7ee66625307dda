from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image

from epdd import wire
from epdd.errors import ModelError, ProtocolError
from tests.models import checkpoints
from tests.worker.language import pd

pytestmark = pytest.mark.takes(50)

LAST = (wire.Done, wire.Failed, wire.Cancelled)


def picture(i: int) -> Image.Image:
    return checkpoints.picture(40 + 37 * (i % 5), 120 - 23 * (i % 4), seed=i)


def prompts(folder: str, count: int) -> dict[str, pd.Prompt]:
    """Text only, one image, text between images, two in a row, eight images: again and again."""
    kinds: list[list[int | Image.Image]] = [
        [20], [5, picture(1), 8], [70], [picture(2), 40, picture(3), 30, picture(4), 2],
        [2, picture(5), picture(6), 7], [3, *(p for i in range(8) for p in (picture(i + 7), i)), 9]]
    return {str(i): pd.prompt(folder, kinds[i % len(kinds)], seed=i) for i in range(count)}


def reference(folder: str, prompt: pd.Prompt, max_new: int = 12) -> list[int]:
    return checkpoints.reference_generate(folder, prompt.tokens, prompt.images, max_new)


def assert_protocol(bench: pd.Bench, work_id: str) -> None:
    """One Prefilled before all tokens, one last message at the end."""
    kinds = [type(message) for message in bench.of(work_id)]
    assert kinds.count(wire.Prefilled) == 1 and kinds[0] is wire.Prefilled
    assert isinstance(bench.of(work_id)[-1], LAST) and sum(kind in LAST for kind in kinds) == 1


@pytest.mark.parametrize("budget", [16, 64, 512])
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_greedy_equals_generate(checkpoint: Callable[..., str], family: str, budget: int) -> None:
    folder = checkpoint(family)
    for name, prompt in prompts(folder, 6).items():
        bench = pd.Bench(folder, max_batched_tokens=budget)
        bench.submit(name, prompt)
        assert bench.run()[name] == reference(folder, prompt), name
        assert_protocol(bench, name)
        assert bench.engine.heartbeat().kv_used == 0


@pytest.mark.parametrize("budget", [16, 64, 512])
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_sixteen_at_once_answer_as_each_alone(checkpoint: Callable[..., str], family: str, budget: int) -> None:
    folder = checkpoint(family)
    bench = pd.Bench(folder, max_batched_tokens=budget)
    wanted = prompts(folder, 16)
    for i, (name, prompt) in enumerate(wanted.items()):
        bench.submit(name, prompt)
        for _ in range(i % 3):      # some join while others decode
            bench.engine.step()
    answers = bench.run()
    for name, prompt in wanted.items():
        assert answers[name] == reference(folder, prompt), name
        assert_protocol(bench, name)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_preempted_requests_answer_the_same_without_their_leases(checkpoint: Callable[..., str], family: str) -> None:
    folder = checkpoint(family)
    bench = pd.Bench(folder, headroom=1, kv_tokens=512, max_batched_tokens=64)
    wanted = {name: prompt for name, prompt in prompts(folder, 12).items() if len(prompt.tokens) < 250}
    leases = {name: bench.submit(name, prompt, max_tokens=80, ignore_eos=True) for name, prompt in wanted.items()}
    told = 0
    while bench.engine.busy:
        bench.engine.step()
        for message in bench.sent[told:]:
            if isinstance(message, wire.Prefilled):
                bench.scribble(leases[message.id])
        told = len(bench.sent)
    assert bench.engine.heartbeat().preempted > 3
    answers = bench.run()
    for name, prompt in wanted.items():
        alone = pd.Bench(folder)
        alone.submit(name, prompt, max_tokens=80, ignore_eos=True)
        assert answers[name] == alone.run()[name]
        assert answers[name][:12] == reference(folder, prompt)[:12] or 0 < len(reference(folder, prompt)) < 12
        assert_protocol(bench, name)


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_preempted(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "top_p": 0.9, "seed": 42, "ignore_eos": True,
                               "repetition_penalty": 1.1, "presence_penalty": 0.3}
    prompt = prompts(folder, 4)["3"]
    alone, crowd = pd.Bench(folder), pd.Bench(folder, headroom=1, kv_tokens=384, max_batched_tokens=48)
    alone.submit("x", prompt, **options)
    for i in range(3):
        crowd.submit(str(i), pd.prompt(folder, [30], seed=i), max_tokens=120, temperature=1.0, ignore_eos=True)
    crowd.submit("x", prompt, **options)
    answer = alone.run()["x"]
    assert len(answer) == 60 and len(set(answer)) > 20
    assert crowd.run()["x"] == answer
    assert crowd.engine.heartbeat().preempted
    other = pd.Bench(folder)
    other.submit("x", prompt, **(options | {"seed": 43}))
    assert other.run()["x"] != answer


def test_stop_tokens_and_lengths(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    prompt = prompts(folder, 1)["0"]
    bench = pd.Bench(folder)
    bench.submit("free", prompt, max_tokens=8, ignore_eos=True)
    free = bench.run()["free"]
    stop = next(token for token in free if token != free[0])
    at = free.index(stop)
    bench.submit("stopped", prompt, max_tokens=8, stop_token_ids=(stop,))
    bench.submit("held", prompt, max_tokens=8, stop_token_ids=(free[0],), min_tokens=3)
    bench.submit("one", prompt, max_tokens=1)
    bench.run()
    assert bench.of("stopped")[1:] == [*(wire.Tokens("stopped", (t,)) for t in free[:at]),
                                       wire.Done("stopped", "stop", stop)]
    assert [m.ids for m in bench.of("held") if isinstance(m, wire.Tokens)][:3].count((free[0],)) == 0
    assert bench.of("one")[1:] == [wire.Tokens("one", (free[0],)), wire.Done("one", "length")]


def test_logprobs_come_with_the_tokens(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    prompt = prompts(folder, 2)["1"]
    bench = pd.Bench(folder)
    bench.submit("x", prompt, max_tokens=4, logprobs=3)
    answer = bench.run()["x"]
    tokens = [message for message in bench.of("x") if isinstance(message, wire.Tokens)]
    model = checkpoints.whole_model(folder)
    values, grid = checkpoints.pixel_values(folder, prompt.images)
    ids = torch.tensor([prompt.tokens + answer])
    with torch.inference_mode():
        logits = model(input_ids=ids, pixel_values=values, image_grid_thw=grid,
                       mm_token_type_ids=(ids == model.config.image_token_id).int()).logits[0]
    for i, message in enumerate(tokens):
        logs = logits[len(prompt.tokens) - 1 + i].log_softmax(-1)
        assert message.logprobs[0].logprob == pytest.approx(float(logs[message.ids[0]]), abs=1e-3)
        assert [t for t, _ in message.logprobs[0].top] == logs.topk(3).indices.tolist()


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_cancel_frees_memory_and_is_answered_once(checkpoint: Callable[..., str], steps: int) -> None:
    folder = checkpoint("qwen3_vl")
    wanted = prompts(folder, 6)
    bench = pd.Bench(folder, max_batched_tokens=64)
    for name in ("5", "1"):
        bench.submit(name, wanted[name], max_tokens=30, ignore_eos=True)
    for _ in range(steps):
        bench.engine.step()
    bench.engine.cancel("5")
    bench.engine.cancel("5")
    bench.engine.cancel("unknown")
    assert bench.of("5")[-1] == wire.Cancelled("5") and bench.sent.count(wire.Cancelled("5")) == 1
    assert len(bench.run()["1"]) == 30
    assert bench.engine.heartbeat().kv_used == 0 and bench.of("5")[-1] == wire.Cancelled("5")


def test_a_poisoned_image_fails_its_request_only(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    wanted = prompts(folder, 2)
    bench = pd.Bench(folder)
    for lease in bench.submit("bad", wanted["1"]):
        bench._arena.view(lease)[:] = b"\xff" * lease.size      # NaN in every float
    bench.submit("good", wanted["0"])
    assert bench.run()["good"] == reference(folder, wanted["0"])
    assert bench.of("bad")[-1] == wire.Failed("bad", "internal_error", "the worker failed on this request")
    for name in ("0", "1"):     # in the memory that held NaN
        bench.submit(f"next {name}", wanted[name])
        assert bench.run()[f"next {name}"] == reference(folder, wanted[name])


def test_random_traffic_under_pressure_keeps_every_promise(checkpoint: Callable[..., str]) -> None:
    """Random arrivals, cancels and preemptions; leases are overwritten as soon as the worker releases them."""
    folder = checkpoint("qwen3_vl")
    rng = random.Random(7)
    bench = pd.Bench(folder, headroom=16, kv_tokens=640, max_batched_tokens=48, max_sequences=12)
    wanted = {name: prompt for name, prompt in prompts(folder, 40).items() if len(prompt.tokens) < 200}
    arriving, leases, cancelled, told = list(wanted), dict[str, list[wire.Lease]](), set[str](), 0
    while arriving or bench.engine.busy:
        if arriving and rng.random() < 0.3:
            name = arriving.pop(0)
            leases[name] = bench.submit(name, wanted[name], max_tokens=rng.choice([1, 12, 60]))
        if leases and rng.random() < 0.03:
            name = rng.choice(list(leases))
            bench.engine.cancel(name)
            cancelled.add(name)
        bench.engine.step()
        for message in bench.sent[told:]:
            if isinstance(message, (wire.Prefilled, *LAST)):
                bench.scribble(leases[message.id])
        told = len(bench.sent)
    assert bench.engine.heartbeat().kv_used == 0 and bench.engine.heartbeat().preempted > 3
    answers = bench.run()
    for name, prompt in wanted.items():
        last = bench.of(name)[-1]
        assert isinstance(last, LAST) and sum(isinstance(m, LAST) for m in bench.of(name)) == 1
        assert isinstance(last, wire.Done) or name in cancelled
        whole = reference(folder, prompt, 60)
        assert answers[name] == whole[:len(answers[name])], name


def test_a_fault_of_a_step_fails_its_batch_and_the_worker_lives(checkpoint: Callable[..., str],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder)
    bench.submit("a", prompts(folder, 1)["0"])

    def fail(batch: object) -> torch.Tensor:
        raise RuntimeError("out of memory at 0x7f00")

    with monkeypatch.context() as patched:
        patched.setattr(bench.runner, "execute", fail)
        bench.engine.step()
    assert bench.sent == [wire.Failed("a", "internal_error", "the worker failed on this request")]
    assert not bench.engine.busy and bench.engine.heartbeat().kv_used == 0
    bench.submit("b", prompts(folder, 1)["0"])
    assert bench.run()["b"] == reference(folder, prompts(folder, 1)["0"])


def test_bad_requests_fail_alone(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder, kv_tokens=256)
    good = prompts(folder, 2)["1"]
    image = good.images[0]
    cases: dict[str, tuple[pd.Prompt, dict[str, Any], str]] = {
        "vocabulary": (pd.Prompt([1, 640]), {}, "invalid_request"),
        "negative": (pd.Prompt([1, -1]), {}, "invalid_request"),
        "empty": (pd.Prompt([]), {}, "worker_failed"),
        "nothing": (pd.Prompt([1]), {"max_tokens": 0}, "invalid_request"),
        "long": (pd.Prompt([1] * 200), {"max_tokens": 57}, "context_length_exceeded"),
        "misplaced": (pd.Prompt(good.tokens, [image], [good.starts[0] + 1]), {}, "worker_failed"),
        "outside": (pd.Prompt(good.tokens, [image], [len(good.tokens) - 2]), {}, "worker_failed"),
    }
    for name, (prompt, sampling, code) in cases.items():
        bench.submit(name, prompt, **sampling)
        last = bench.of(name)[-1]
        assert isinstance(last, wire.Failed) and last.code == code, name
    bench.submit("fits", pd.Prompt([1] * 200), max_tokens=56)
    bench.submit("good", good)
    assert bench.run()["good"] == reference(folder, good)


def test_a_lease_outside_the_arena_fails_its_request(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder)
    prompt = prompts(folder, 2)["1"]
    _, grid = pd.embed(folder, prompt.images[0])
    rows = bench.family.rows(grid)
    for work_id, lease in (("far", wire.Lease(pd.ARENA_BYTES, rows * 4096)), ("small", wire.Lease(0, rows * 64))):
        span = wire.Span(prompt.starts[0], rows, grid, lease, "float32", "")
        bench.engine.submit(wire.Generate(work_id, (span,), wire.Sampling(max_tokens=1)),
                            torch.tensor(prompt.tokens, dtype=torch.int32).numpy().tobytes())
        assert isinstance(bench.of(work_id)[-1], wire.Failed)


def test_another_roles_work_and_double_ids_are_protocol_errors(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder)
    with pytest.raises(ProtocolError):
        bench.engine.submit(wire.Encode("x", wire.Lease(0, 1), (1, 2, 2), 1, (28, 28)), b"")
    bench.submit("x", pd.Prompt([1]))
    with pytest.raises(ProtocolError):
        bench.submit("x", pd.Prompt([1]))


def test_ready_tells_capacity_and_warm_up_leaves_nothing(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder, kv_tokens=1000)
    ready = bench.engine.warm_up(lambda done: None)
    assert (ready.kv_tokens, ready.max_model_len, ready.dtype) == (960, 960, "float32")
    assert not bench.sent and bench.engine.heartbeat() == wire.Heartbeat(steps=0)
    assert pd.Bench(folder, kv_tokens=0, kv_bytes=1 << 20, max_model_len=100).runner.ready.max_model_len == 100
    heads_bytes = 2 * 3 * 2 * 16 * 4
    by_bytes = pd.Bench(folder, kv_tokens=0, kv_bytes=heads_bytes * 640).engine.warm_up(lambda done: None)
    assert by_bytes.kv_tokens == 640
    with pytest.raises(ModelError):
        pd.Bench(folder, kv_tokens=63)


def test_bfloat16_weights_answer_too(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl", dtype="bfloat16")
    bench = pd.Bench(folder, dtype="bfloat16")
    bench.submit("x", prompts(folder, 2)["1"], logprobs=0)
    answer = bench.run()["x"]
    assert answer and bench.runner.language.dtype is torch.bfloat16
    assert all(math.isfinite(m.logprobs[0].logprob) for m in bench.of("x") if isinstance(m, wire.Tokens))
