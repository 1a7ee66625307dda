"""Answers with and without prefix cache are equal, token for token, and cached tokens are not computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from epdd import wire
from epdd.worker.language.scheduler import BLOCK_SIZE
from tests.models import checkpoints
from tests.worker.language import pd
from tests.worker.language.test_engine import assert_protocol, picture, reference

pytestmark = pytest.mark.takes(80)

Part = int | Image.Image


def cached(bench: pd.Bench, work_id: str) -> int:
    """Cached prompt tokens that a request reports."""
    return next(message.cached_tokens for message in bench.of(work_id) if isinstance(message, wire.Prefilled))


def cut(prompt: pd.Prompt, at: int, seed: int) -> pd.Prompt:
    """The prompt's first `at` tokens, no image divided, and other text behind."""
    rng = random.Random(seed)
    images = [(image, start) for image, start in zip(prompt.images, prompt.starts) if start < at]
    if images:
        start = images[-1][1]
        rows = next(i for i, token in enumerate(prompt.tokens[start:]) if token != prompt.tokens[start])
        at = max(at, start + rows + 1)
    return pd.Prompt(prompt.tokens[:at] + [rng.randrange(300) for _ in range(rng.choice([1, 9, 70]))],
                     [image for image, _ in images], [start for _, start in images])


def same(a: pd.Prompt, b: pd.Prompt) -> int:
    """Tokens that two prompts made by `cut` of one have in common."""
    return next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), min(len(a.tokens), len(b.tokens)))


@pytest.mark.parametrize("budget", [16, 64, 512])
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_a_beginning_cut_anywhere_is_found_and_changes_no_token(checkpoint: Callable[..., str], family: str,
                                                                budget: int) -> None:
    folder = checkpoint(family)
    first = pd.prompt(folder, [3, picture(1), 20, picture(2), 30, picture(8), 40])
    bench = pd.Bench(folder, max_batched_tokens=budget, kv_tokens=8192)
    bench.submit("first", first)
    bench.run()
    for number, at in enumerate([1, 2, 5, 30, 63, 64, 65, 100, 128, 150, 200, len(first.tokens) - 1]):
        prompt, name = cut(first, at, number), str(number)
        bench.submit(name, prompt)
        assert bench.run()[name] == reference(folder, prompt), at
        assert cached(bench, name) >= min(same(first, prompt), len(prompt.tokens) - 1)
        assert_protocol(bench, name)
    assert bench.engine.heartbeat().kv_used == 0 < bench.engine.heartbeat().kv_cached


def test_with_all_images_known_no_lease_is_read(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder, max_batched_tokens=64)
    parts: list[Part] = [3, *(part for i in range(8) for part in (picture(i + 7), 2))]
    first, second = pd.prompt(folder, [*parts, 9], 1), pd.prompt(folder, [*parts, 30], 1)
    bench.submit("first", first)
    bench.run()
    bench.scribble(bench.submit("second", second))
    bench.engine.step()
    assert bench.of("second")[0] == wire.Prefilled("second", same(first, second))
    assert same(first, second) > second.starts[-1]
    assert bench.run()["second"] == reference(folder, second)


def test_the_next_turn_finds_the_answer_too(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder)
    prompt = pd.prompt(folder, [5, picture(3), 12])
    bench.submit("0", prompt, max_tokens=40, ignore_eos=True)
    for turn in range(1, 5):
        answer = bench.run()[str(turn - 1)]
        known = len(prompt.tokens) + len(answer) - 1        # the last token's keys were never computed
        more = pd.prompt(folder, [11, picture(turn + 4), 6], seed=turn)
        starts = [len(prompt.tokens) + len(answer) + start for start in more.starts]
        prompt = pd.Prompt(prompt.tokens + answer + more.tokens, prompt.images + more.images, prompt.starts + starts)
        bench.submit(str(turn), prompt, max_tokens=40, ignore_eos=True)
        alone = pd.Bench(folder, prefix_cache=False)
        alone.submit("x", prompt, max_tokens=40, ignore_eos=True)
        assert bench.run()[str(turn)] == alone.run()["x"]
        assert cached(bench, str(turn)) == known and cached(alone, "x") == 0


def test_no_hit_across_images(checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tokens with other pictures: nothing after the first different picture is a hit."""
    folder = checkpoint("qwen3_vl")
    a, b, c = (checkpoints.picture(100, 80, seed=seed) for seed in range(3))
    bench = pd.Bench(folder)

    def ask(name: str, first: Image.Image, second: Image.Image) -> int:
        prompt = pd.prompt(folder, [70, first, 5, second, 12])
        bench.submit(name, prompt)
        assert bench.run()[name] == reference(folder, prompt), name
        return cached(bench, name) - prompt.starts[0]

    second = len(pd.prompt(folder, [0, a, 5]).tokens)       # its first placeholder, counted from the first picture's
    assert ask("a b", a, b) == -71
    assert ask("b a", b, a) == 0
    assert ask("c b", c, b) == 0
    assert ask("a c", a, c) == second
    assert ask("a b again", a, b) == second + len(pd.prompt(folder, [b, 12]).tokens) - 2
    monkeypatch.setattr(pd, "digest", lambda image: wire.content_hash(image.tobytes()) + "other options")
    assert ask("other options", a, b) == 0


def test_ten_thousand_pictures_have_as_many_names(checkpoint: Callable[..., str]) -> None:
    from epdd.worker.language.batch_inputs import content
    spans = [wire.Span(1, 4, (1, 4, 4), wire.Lease(0, 1), "float32", wire.content_hash(b"%d" % i) + "0" * 16)
             for i in range(10_000)]
    names = {content([5, 6, 6, 6, 6, 7], (span,)) for span in spans}
    assert len(names) == 10_000 and all(name[1] > 1 << 160 and name[2:] == (6, 6, 6, 7) for name in names)


@pytest.mark.parametrize("sampling", [
    {"repetition_penalty": 1.3}, {"presence_penalty": 0.5, "frequency_penalty": 0.3}, {"logprobs": 3},
    {"temperature": 1.0, "seed": 5, "top_p": 0.9}, {"logit_bias": {7: 3.0}, "min_tokens": 4},
    {"grammar": "start: /[a-z ]{20,30}/"}])
def test_what_chooses_the_tokens_sees_no_difference(checkpoint: Callable[..., str], sampling: dict[str, Any]) -> None:
    folder = checkpoint("qwen3_vl")
    prompt = pd.prompt(folder, [70, picture(4), 20])
    bench, alone = pd.Bench(folder), pd.Bench(folder, prefix_cache=False)
    bench.submit("before", prompt)
    bench.run()
    for one in (bench, alone):
        one.submit("x", prompt, max_tokens=30, **sampling)
        one.run()
    assert cached(bench, "x") == len(prompt.tokens) - 1
    found, wanted = bench.of("x")[1:], alone.of("x")[1:]
    assert [getattr(m, "ids", m) for m in found] == [getattr(m, "ids", m) for m in wanted]
    for one, other in zip(found, wanted):
        for a, b in zip(getattr(one, "logprobs", ()), getattr(other, "logprobs", ())):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4) and [t for t, _ in a.top] == [t for t, _ in b.top]


@pytest.mark.parametrize("budget", [16, 512])
def test_choices_share_one_prefill(checkpoint: Callable[..., str], budget: int) -> None:
    """Also where the first is cancelled in the middle of it: then the next one takes over."""
    folder = checkpoint("qwen3_vl")
    prompt = pd.prompt(folder, [5, picture(1), 80, picture(2), 30])
    other = pd.prompt(folder, [40], seed=3)
    for cancelled in (False, True):
        bench = pd.Bench(folder, max_batched_tokens=budget)
        computed = count_rows(bench)
        for name in "abcd":
            bench.submit(name, prompt)
        bench.submit("other", other)
        if cancelled:
            bench.engine.step()
            bench.engine.cancel("a")
        answers = bench.run()
        names = "bcd" if cancelled else "abcd"
        assert all(answers[name] == reference(folder, prompt) for name in names)
        assert answers["other"] == reference(folder, other)
        told = sorted(cached(bench, name) for name in names)
        last = len(prompt.tokens) - 1
        if not cancelled:
            assert told == [0, last, last, last] and cached(bench, "a") == 0
            decoded = sum(len(answers[name]) - 1 for name in [*names, "other"])
            assert computed() == len(prompt.tokens) + 3 + len(other.tokens) + decoded
        elif budget == 16:
            assert told == [0, last, last]


def count_rows(bench: pd.Bench) -> Callable[[], int]:
    """Rows that the engine's steps compute from now on."""
    rows, run = [0], bench.runner.execute

    def counted(batch: Any) -> Any:
        rows[0] += sum(count for _, count in batch.chunks)
        return run(batch)

    bench.runner.execute = counted     # type: ignore[method-assign]
    return lambda: rows[0]


def test_a_running_request_is_a_beginning_too(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder)
    parts: list[Part] = [3, picture(1), 5, picture(2)]
    first, second = pd.prompt(folder, [*parts, 7], 1), pd.prompt(folder, [*parts, 50], 1)
    bench.submit("first", first, max_tokens=30, ignore_eos=True)
    bench.engine.step()
    bench.submit("second", second)
    answers = bench.run()
    assert cached(bench, "second") == same(first, second) > 0
    assert answers["second"] == reference(folder, second)
    assert answers["first"][:4] == reference(folder, first)[:4]


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_random_conversations_under_pressure(checkpoint: Callable[..., str], family: str) -> None:
    """Few prefixes, many endings, several answers each, too little memory: evictions, preemptions, moves, cancels."""
    folder = checkpoint(family)
    rng = random.Random(11)
    bench = pd.Bench(folder, headroom=1, kv_tokens=640, max_batched_tokens=48, max_sequences=12)
    starts: list[list[Part]] = [[70], [3, picture(1), 40], [3, picture(2), 40], [3, picture(1), 40, picture(2), 9]]
    wanted, told, leases, cancelled = dict[str, pd.Prompt](), 0, dict[str, list[wire.Lease]](), set[str]()
    arriving = [(f"{i}", [*rng.choice(starts), rng.choice([1, 20, 90])], rng.randrange(4)) for i in range(40)]
    while arriving or bench.engine.busy:
        if arriving and rng.random() < 0.7:
            name, parts, seed = arriving.pop()
            for choice in range(rng.choice([1, 1, 3])):
                wanted[f"{name}.{choice}"] = pd.prompt(folder, parts, seed)
                leases[f"{name}.{choice}"] = bench.submit(f"{name}.{choice}", wanted[f"{name}.{choice}"],
                                                          max_tokens=rng.choice([1, 40, 60]))
        if leases and rng.random() < 0.03:
            name = rng.choice(list(leases))
            bench.engine.cancel(name)
            cancelled.add(name)
        bench.engine.step()
        for message in bench.sent[told:]:
            if isinstance(message, (wire.Prefilled, wire.Done, wire.Failed, wire.Cancelled)):
                bench.scribble(leases[message.id])
        told = len(bench.sent)
    assert bench.engine.heartbeat().kv_used == 0 and bench.engine.heartbeat().preempted > 3
    assert sum(message.cached_tokens for message in bench.sent if isinstance(message, wire.Prefilled)) > 2000
    answers = bench.run()
    for name, prompt in wanted.items():
        assert isinstance(bench.of(name)[-1], wire.Done) or name in cancelled
        whole = reference(folder, prompt, 60)
        assert answers[name] == whole[:len(answers[name])], name


def test_a_poisoned_prompt_is_never_a_beginning(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder, max_batched_tokens=64)
    prompt = pd.prompt(folder, [5, picture(1), 100])
    for lease in bench.submit("bad", prompt):
        bench._arena.view(lease)[:] = b"\xff" * lease.size      # NaN in every float
    bench.run()
    assert isinstance(bench.of("bad")[-1], wire.Failed) and bench.engine.heartbeat().kv_cached == 0
    bench.submit("good", prompt)
    assert bench.run()["good"] == reference(folder, prompt) and cached(bench, "good") == 0


def test_switched_off_nothing_is_kept_or_shared(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder, prefix_cache=False)
    prompt = pd.prompt(folder, [5, picture(1), 8])
    for name in "ab":
        bench.submit(name, prompt)
    answers = bench.run()
    assert answers["a"] == answers["b"] == reference(folder, prompt)
    assert cached(bench, "a") == cached(bench, "b") == 0 == bench.engine.heartbeat().kv_cached


def test_a_prompt_of_nearly_all_memory_finds_itself(checkpoint: Callable[..., str]) -> None:
    """Its new place can only lie over the old one."""
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder, kv_tokens=5 * BLOCK_SIZE)
    prompt = pd.prompt(folder, [100, picture(1), 100])
    for name in "abc":
        bench.submit(name, prompt)
        assert bench.run()[name] == reference(folder, prompt)
    assert cached(bench, "b") == cached(bench, "c") == len(prompt.tokens) - 1


def test_what_was_not_computed_again_is_not_taken_for_known(checkpoint: Callable[..., str]) -> None:
    """Preempted, evicted, restarted and cancelled: its memory holds only a part of its former content."""
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder, headroom=1, kv_tokens=4 * BLOCK_SIZE, max_batched_tokens=32)
    prompt = pd.prompt(folder, [120])
    bench.submit("older", pd.prompt(folder, [40], seed=1), max_tokens=120, ignore_eos=True)
    bench.engine.step()
    bench.engine.step()
    bench.submit("x", prompt, max_tokens=60, ignore_eos=True)
    while not bench.engine.heartbeat().preempted:
        bench.engine.step()
    assert len(bench.of("x")) > 1
    bench.runner.memory.forget()
    bench.engine.cancel("older")
    bench.engine.step()
    assert 0 < bench.engine._requests["x"].computed < len(prompt.tokens)
    first = bench.runner.memory.offset("x") + bench.engine._requests["x"].computed
    for pool in (*bench.runner.memory._keys, *bench.runner.memory._values):
        pool[:, first:] = 7.0       # nothing of before is there
    bench.engine.cancel("x")
    bench.submit("y", prompt)
    assert bench.run()["y"] == reference(folder, prompt)
