"""Emulated roles on a clock that only their waits advance: times of messages, and contents of leases."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from epdd import arena, families, wire
from epdd.emulated_time import Clock, EmulatedModel, EncoderGroup, Formula, EmulatedWorker, PrefillDecodeGroup, Slow
from epdd.errors import ProtocolError, WorkerFailed
from epdd.families import DEMO
from epdd.worker.emulated import delay, pattern
from epdd.worker.emulated.encoder import EmulatedEncoder
from epdd.worker.emulated.prefill_decode import EmulatedPrefillDecode
from tests.worker.language import pd

MODEL = EmulatedModel(hidden=8, planes=2, dtype="bfloat16", patch=8, merge=2, min_pixels=256, max_pixels=65536)
FAMILY = families.load(str(DEMO))
EOS = FAMILY.eos_ids[0]
TEXT = (11, 12, 13)
GRID, ROWS, SIZE, BYTES = (1, 4, 6), 6, (84, 56), 6 * 8 * 2 * 2


class World:
    """A role, its clock and its messages with the real second of each; waking takes `latency_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group: Any, scale: float = 1.0, latency_s: float = 0.0,
                 **options: Any) -> None:
        self.now, self.latency_s = 0.0, latency_s
        self.said: list[tuple[float, wire.FromWorker]] = []
        self.mapping = arena.Mapping(arena.create(pd.ARENA_BYTES), pd.ARENA_BYTES)
        monkeypatch.setattr(delay.time, "sleep", self.wait)
        role = "encoder" if isinstance(group, EncoderGroup) else "pd"
        emulated = EmulatedWorker(answers="rows", scale=scale, seed=0, group=group, model=MODEL, text=TEXT)
        spec = pd.spec(str(DEMO), role, emulated=emulated, max_model_len=2048, **options)
        self.role: Any = (EmulatedEncoder if role == "encoder" else EmulatedPrefillDecode)(
            spec, self.mapping, lambda message: self.said.append((self.now, message)), self.wait,
            Clock(scale, lambda: self.now))
        self.ready: wire.Ready = self.role.warm_up(lambda done: None)

    def wait(self, seconds: float) -> None:
        self.now += seconds + self.latency_s

    def run(self) -> list[wire.FromWorker]:
        while self.role.busy:
            self.role.step()
        return [message for _, message in self.said]

    def when(self, kind: type) -> list[float]:
        return [moment for moment, message in self.said if isinstance(message, kind)]

    def encode(self, name: str, data: bytes = b"image", offset: int = 0, **fields: Any) -> None:
        usual = {"grid": GRID, "rows": ROWS, "size": SIZE}
        message = wire.Encode(name, wire.Lease(offset, 2 * BYTES), **(usual | fields))
        self.role.submit(message, data)

    def generate(self, name: str, prompt: int = 4, images: tuple[bytes, ...] = (), **sampling: Any) -> None:
        """A prompt of `prompt` tokens, then each image, lying in the leases one after another, and a token."""
        tokens, spans = [1] * prompt, []
        for i, data in enumerate(images):
            spans.append(wire.Span(len(tokens), ROWS, GRID, wire.Lease(4096 * i, BYTES), "bfloat16",
                                   f"{wire.content_hash(data)}00ff"))
            tokens += [FAMILY.image_token_id] * ROWS + [2]
        self.role.submit(wire.Generate(name, tuple(spans), wire.Sampling(**({"max_tokens": 8} | sampling))),
                         array("i", tokens).tobytes())

    def tokens(self, name: str) -> list[int]:
        return [token for _, message in self.said if isinstance(message, wire.Tokens) and message.id == name
                for token in message.ids]


def encoders(**fields: Any) -> EncoderGroup:
    return EncoderGroup(**({"kind": "cpu", "count": 1, "seconds": Formula(b=0.05)} | fields))


def decoders(rate: float = 100.0, a: float = 0.1, b: float = 0.01) -> PrefillDecodeGroup:
    return PrefillDecodeGroup(kind="gpu", count=1, prefill_tokens_per_s=rate, decode=Formula(a, b), kv_tokens=4096,
                              context_max=2048)


# --- encoder


def test_images_go_out_one_after_another_without_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, encoders(), scale=2.0, latency_s=0.003)
    for i in range(50):
        world.encode(f"e{i}", offset=4096 * i)
    answers = world.run()
    assert [message.id for message in answers] == [f"e{i}" for i in range(50)]
    # 24 patches, 0.05 s each, at double speed: 0.6 s an image.
    assert {round(message.seconds, 9) for message in answers} == {0.6}
    for i, moment in enumerate(world.when(wire.Encoded)):
        assert 0 <= moment - 0.6 * (i + 1) <= 0.007
    assert world.role.heartbeat() == wire.Heartbeat(steps=50)


def test_an_image_begins_when_it_comes_and_waiting_is_not_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, encoders())
    world.encode("a")
    world.run()
    world.now = 5.0
    world.encode("b")
    world.encode("c")
    world.run()
    assert world.when(wire.Encoded) == pytest.approx([1.2, 6.2, 7.4])
    assert [round(message.seconds, 9) for _, message in world.said] == [1.2] * 3      # type: ignore[union-attr]


def test_a_cpu_becomes_slower_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, encoders(slow=(Slow(2.0, 3.0),)))
    for i in range(4):
        world.encode(str(i))
    world.run()
    assert world.when(wire.Encoded) == pytest.approx([1.2, 2.4, 6.0, 9.6])


def test_samples_are_those_of_the_profile_in_real_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, encoders(seconds=((16, 0.5), (64, 2.0))), scale=10.0)
    assert world.ready.samples == ((16, 0.05), (64, 0.2)) and world.ready.dtype == "bfloat16"


def test_a_waiting_image_is_cancelled_at_once_and_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, encoders())
    for name in "abc":
        world.encode(name)
    world.role.step()
    world.role.cancel("b")
    world.role.cancel("a")      # has begun: encoded to its end, as on a device
    assert world.said == [(world.now, wire.Cancelled("b"))]
    world.run()
    assert [message.id for _, message in world.said] == ["b", "a", "c"]         # type: ignore[union-attr]
    assert world.when(wire.Encoded) == pytest.approx([1.2, 2.4])


def test_work_that_takes_longer_than_modelled_is_told_and_counted(monkeypatch: pytest.MonkeyPatch,
                                                                  caplog: pytest.LogCaptureFixture) -> None:
    world = World(monkeypatch, encoders())
    write = pattern.write

    def slow_write(view: memoryview, content: str) -> None:
        write(view, content)
        world.now += 2.0

    monkeypatch.setattr(pattern, "write", slow_write)
    for i in range(3):
        world.encode(str(i))
    answers = world.run()
    assert [round(message.seconds, 9) for message in answers] == [2.0] * 3      # type: ignore[union-attr]
    assert world.when(wire.Encoded) == pytest.approx([2.0, 4.0, 6.0]) and world.role.late == 3
    assert caplog.text.count("slower than its profile") == 1


def test_images_that_do_not_fit_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, encoders())
    world.encode("rows", rows=7)
    world.encode("outside", offset=pd.ARENA_BYTES)
    world.role.submit(wire.Encode("small", wire.Lease(0, BYTES - 1), GRID, ROWS, SIZE), b"x")
    assert [(message.id, message.code) for message in world.run()] == [       # type: ignore[union-attr]
        (name, "worker_failed") for name in ("rows", "outside", "small")]
    assert world.now == 0.0
    with pytest.raises(ProtocolError):
        world.role.submit(wire.Generate("g", (), wire.Sampling(max_tokens=1)), b"")


# --- leases


def test_every_byte_of_a_lease_is_that_images() -> None:
    size = 3 * pattern.BLOCK_BYTES + 100
    lease, a, b = memoryview(bytearray(size)), wire.content_hash(b"a"), wire.content_hash(b"b")
    pattern.write(lease, a)
    pattern.check(lease, a)
    for wrong, view in ((b, lease), (a, lease[:-64])):
        with pytest.raises(WorkerFailed, match="holds other rows, from byte 0"):
            pattern.check(view, wrong)
    for at in (0, pattern.BLOCK_BYTES + 7, size - 1):
        lease[at] ^= 1
        with pytest.raises(WorkerFailed, match=f"from byte {at // pattern.BLOCK_BYTES * pattern.BLOCK_BYTES} of"):
            pattern.check(lease, a)
        lease[at] ^= 1


def encoded(world: World, *images: bytes) -> None:
    """The images' rows in the leases that `generate` names."""
    for i, data in enumerate(images):
        pattern.write(world.mapping.view(wire.Lease(4096 * i, BYTES)), wire.content_hash(data))


def test_a_lease_with_another_images_rows_fails_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, decoders())
    encoded(world, b"one", b"two")
    world.generate("mixed", images=(b"two", b"one"))
    world.generate("good", images=(b"one", b"two"))
    world.run()
    (failed,) = [message for _, message in world.said if isinstance(message, wire.Failed)]
    assert (failed.id, failed.code) == ("mixed", "worker_failed") and "holds other rows" in failed.message
    assert world.tokens("good") == list(TEXT) and not world.tokens("mixed")
    assert world.role.heartbeat().kv_used == 0


def test_leases_are_read_until_prefilled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 6 tokens a step the second image is read in the third; overwritten before that, it is noticed."""
    for overwritten in (False, True):
        world = World(monkeypatch, decoders(), max_batched_tokens=6)
        encoded(world, b"one", b"two")
        world.generate("a", images=(b"one", b"two"))
        while world.now < 0.15:
            world.role.step()
        assert not world.said
        if overwritten:
            encoded(world, b"one", b"one")
        kinds = [type(message) for message in world.run()]
        assert kinds == ([wire.Failed] if overwritten else [wire.Prefilled, *[wire.Tokens] * 3, wire.Done])
    encoded(world, b"", b"")


# --- prefill and decode


def test_steps_take_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, decoders(), max_batched_tokens=40, latency_s=0.003)
    world.generate("a", prompt=100, max_tokens=3, ignore_eos=True)
    world.run()
    # Chunks of 40, 40 and 20 tokens at 100 a second; the last gives the first token; then two decode steps of one.
    assert world.when(wire.Prefilled) == pytest.approx([1.0], abs=0.007)
    assert world.when(wire.Tokens) == pytest.approx([1.0, 1.11, 1.22], abs=0.007)
    assert world.said[-1][1] == wire.Done("a", "length")


def test_prompts_are_mixed_into_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, decoders(), max_batched_tokens=20)
    world.generate("a", prompt=10, max_tokens=50, ignore_eos=True)
    while not world.tokens("a"):
        world.role.step()
    world.generate("b", prompt=38, max_tokens=50, ignore_eos=True)
    while not world.tokens("b"):
        world.role.step()
    # Two steps of 19 prompt tokens beside a's one: 0.19 + 0.01 s each; a's stream goes on meanwhile.
    assert world.when(wire.Tokens)[:4] == pytest.approx([0.1, 0.3, 0.5, 0.5])
    world.role.step()
    world.role.step()
    assert world.now == pytest.approx(0.62)         # both decode: 0.1 + 2 * 0.01


def test_the_next_request_begins_at_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, decoders())
    world.generate("a", prompt=10, max_tokens=1)
    world.run()
    world.now = 7.0
    world.generate("b", prompt=10, max_tokens=1)
    world.run()
    assert world.when(wire.Done) == pytest.approx([0.1, 7.1])


@pytest.mark.parametrize("sampling, said, last", [
    ({"max_tokens": 2}, [11, 12], wire.Done("a", "length")),
    ({}, [11, 12, 13], wire.Done("a", "stop", EOS)),
    ({"ignore_eos": True}, [11, 12, 13, 11, 12, 13, 11, 12], wire.Done("a", "length")),
    ({"min_tokens": 5}, [11, 12, 13, 11, 12], wire.Done("a", "stop", EOS)),
    ({"stop_token_ids": (12,)}, [11], wire.Done("a", "stop", 12)),
    ({"stop_token_ids": (12,), "min_tokens": 4}, [11, 11, 13, 11], wire.Done("a", "stop", EOS)),
])
def test_what_is_said_and_how_it_ends(monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], said: list[int],
                                      last: wire.Done) -> None:
    world = World(monkeypatch, decoders())
    world.generate("a", **sampling)
    assert world.run()[-1] == last and world.tokens("a") == said


def test_logprobs_of_a_text_that_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, decoders())
    world.generate("a", logprobs=2, max_tokens=1)
    assert wire.Tokens("a", (11,), (wire.TokenLogprob(0.0, ((11, 0.0),)),)) in world.run()


def test_cancel_in_the_middle_of_a_step_is_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, decoders(a=1.0))
    world.generate("a", max_tokens=50, ignore_eos=True)
    world.generate("b", max_tokens=2, ignore_eos=True)
    while len(world.tokens("a")) < 1:
        world.role.step()
    world.role.step()
    world.role.cancel("a")
    world.role.cancel("b")      # its last token and Done are due at the step's end
    before = len(world.said)
    assert world.said[-1][1] == wire.Cancelled("a")
    world.run()
    assert {message.id for _, message in world.said[before:]} == {"b"}      # type: ignore[union-attr]
    assert world.said[-1][1] == wire.Done("b", "length") and len(world.tokens("b")) == 2


def test_bad_requests_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, decoders())
    world.generate("long", prompt=2048)
    world.generate("none", max_tokens=0)
    world.role.submit(wire.Generate("span", (wire.Span(0, 6, GRID, wire.Lease(0, BYTES), "bfloat16", "x"),),
                                    wire.Sampling(max_tokens=1)), array("i", [1] * 9).tobytes())
    codes = [(message.id, message.code) for message in world.run()]         # type: ignore[union-attr]
    assert codes == [("long", "context_length_exceeded"), ("none", "invalid_request"), ("span", "worker_failed")]
    with pytest.raises(ProtocolError):
        world.role.submit(wire.Encode("e", wire.Lease(0, 1), GRID, ROWS, SIZE), b"")


def test_when_memory_is_short_the_youngest_is_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, decoders(rate=1e4, a=0.001, b=0.0), kv_tokens=640)
    for name in "abc":
        world.generate(name, prompt=60, max_tokens=300, ignore_eos=True)
    world.run()
    assert [len(world.tokens(name)) for name in "abc"] == [300] * 3
    assert [len(world.when(kind)) for kind in (wire.Prefilled, wire.Done)] == [3, 3]
    assert world.role.heartbeat().kv_used == 0
