"""Time models of emulated workers: data of a worker's spec, a clock and a timeline.

A profile file consists of these structs, so an `EmulatedWorker` has only checked values.  The only I/O here is reading
the monotonic clock.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0, le=1e5)]
Factor = Annotated[float, Meta(ge=1e-3, le=1e3)]
SCALE_MIN, SCALE_MAX = 1e-3, 1e3
SpeedScale = Annotated[float, Meta(ge=SCALE_MIN, le=SCALE_MAX)]
TokenCount = Annotated[int, Meta(ge=64, le=1 << 30)]
Samples = Annotated[tuple[tuple[Annotated[int, Meta(ge=1, le=1 << 30)], Seconds], ...], Meta(min_length=1)]

# Numbers of patches for which an encoder with a formula reports seconds, like the warm-up of a real one.
SAMPLED = (16, 64, 256, 1024, 4096, 16384)


class Formula(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds = a + b * n + c * n^2."""

    a: Seconds = 0.0
    b: Seconds = 0.0
    c: Seconds = 0.0

    def __post_init__(self) -> None:
        if not self.a + self.b + self.c:
            raise ValueError("a, b and c must not all be 0")

    def seconds(self, n: int) -> float:
        return self.a + self.b * n + self.c * n * n


class Slow(Struct, frozen=True, forbid_unknown_fields=True):
    """From `after_s` on (emulated seconds since the worker was ready), everything takes `factor` times as long."""

    after_s: Seconds
    factor: Factor


class Group(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that encoders and prefill-decode workers share."""

    kind: Literal["cpu", "gpu"]
    count: Annotated[int, Meta(ge=1, le=256)]
    jitter: Annotated[float, Meta(ge=0, le=2)] = 0.0    # sigma of a lognormal factor whose mean is 1
    slow: tuple[Slow, ...] = ()

    def __post_init__(self) -> None:
        moments = [slow.after_s for slow in self.slow]
        if moments != sorted(set(moments)):
            raise ValueError("slow: after_s must rise from one to the next")

    def slowness(self, now: float) -> float:
        """The factor at `now`, in emulated seconds since the worker was ready."""
        return next((slow.factor for slow in reversed(self.slow) if slow.after_s <= now), 1.0)


class EncoderGroup(Group, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Vision encoders, which encode one image at a time."""

    seconds: Formula | Samples          # of an image, n being its patches; or [[patches, seconds], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.seconds, Formula):
            for (patches, seconds), (more, longer) in zip(self.seconds, self.seconds[1:]):
                if more <= patches or longer < seconds:
                    raise ValueError("seconds: the patches of samples must rise, their seconds must not fall")
            if not self.seconds[0][1]:
                raise ValueError("seconds: a sample's seconds must be over 0")

    def image_seconds(self, patches: int) -> float:
        """Seconds of an image: linear between samples, proportional below the first, along the last line above."""
        if isinstance(self.seconds, Formula):
            return self.seconds.seconds(patches)
        points = ((0, 0.0), *self.seconds)
        i = next((i for i, (n, _) in enumerate(points[1:-1]) if patches <= n), len(points) - 2)
        (low, at_low), (high, at_high) = points[i], points[i + 1]
        return at_low + (at_high - at_low) * (patches - low) / (high - low)

    def samples(self, patches_max: int) -> tuple[tuple[int, float], ...]:
        """(patches, seconds) as a warm-up would measure them, before any slowdown."""
        if isinstance(self.seconds, Formula):
            return tuple((n, self.image_seconds(n)) for n in sorted({min(n, patches_max) for n in SAMPLED}))
        return self.seconds


class PrefillDecodeGroup(Group, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prefill-decode workers, whose steps mix prompt chunks with decoding."""

    prefill_tokens_per_s: Annotated[float, Meta(gt=0, le=1e9)]
    decode: Formula                     # seconds of a step, n being the sequences that decode in it
    kv_tokens: TokenCount
    context_max: TokenCount

    def step_seconds(self, prefill: int, decoding: int) -> float:
        """Seconds of a step of `prefill` prompt tokens and `decoding` sequences.

        max(decode.a, prefill / prefill_tokens_per_s) + decode.b * decoding + decode.c * decoding^2: a step reads
        all weights once (a) or computes, whichever takes longer, and each decoding sequence adds to that.
        """
        return (max(self.decode.a, prefill / self.prefill_tokens_per_s)
                + self.decode.seconds(decoding) - self.decode.a)


class EmulatedModel(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes that give embeddings their real size without a real model; sizes of images in pixels."""

    hidden: Annotated[int, Meta(ge=1, le=1 << 17)]
    planes: Annotated[int, Meta(ge=1, le=64)]           # 1 + deepstack levels
    dtype: Literal["float32", "bfloat16", "float16"]
    patch: Annotated[int, Meta(ge=1, le=256)]           # side in pixels
    merge: Annotated[int, Meta(ge=1, le=16)]            # merge x merge patches become one image token
    min_pixels: Annotated[int, Meta(ge=1, le=1 << 30)]
    max_pixels: Annotated[int, Meta(ge=1, le=1 << 30)]

    def __post_init__(self) -> None:
        if not self.min_pixels <= self.max_pixels or self.max_pixels < (self.patch * self.merge) ** 2:
            raise ValueError("max_pixels must hold min_pixels, and a square of patch * merge pixels a side")


class EmulatedWorker(Struct, frozen=True, kw_only=True):
    """Everything that an emulated worker needs."""

    answers: Literal["rows", "demo"]
    scale: float                        # how many times faster than the profile says
    seed: int                           # of the jitter
    group: EncoderGroup | PrefillDecodeGroup
    model: EmulatedModel | None                 # with answers = "rows"
    text: tuple[int, ...]               # token ids of a PD worker's answer, with answers = "rows"


class Clock:
    """Emulated seconds since `start`: `scale` times the real ones."""

    def __init__(self, scale: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._scale, self._monotonic = scale, monotonic
        self.start()

    def start(self) -> None:
        """Set the clock to 0."""
        self._began = self._monotonic()

    def now(self) -> float:
        return (self._monotonic() - self._began) * self._scale

    def real(self, seconds: float) -> float:
        """Real seconds that this many emulated seconds take."""
        return seconds / self._scale


class Service(Struct, frozen=True):
    """When one piece of work begins and ends, in emulated seconds."""

    start: float
    end: float
    late: bool                          # the real work took longer than the model says


class Timeline:
    """Work of one worker, one piece after another: a piece begins when it has arrived and the previous one has ended.

    Times do not depend on when the process woke up, so that delays of a busy machine do not add up.
    """

    def __init__(self, group: Group, seed: str) -> None:
        """`seed` of this worker: equal seeds give equal jitter."""
        self._group = group
        self._random = random.Random(seed)
        self.end = 0.0

    def serve(self, ready: float, seconds: float, done: float = 0.0) -> Service:
        """Times of the next piece of work, which arrived at `ready` and takes `seconds` by its time model.

        `done`: when the real work was done.  If that is later than the modelled end, it is the end, and the next piece
        begins there, because the machine cannot make up for lost time.
        """
        start = max(ready, self.end)
        sigma = self._group.jitter
        factor = math.exp(self._random.gauss(-sigma * sigma / 2, sigma)) if sigma else 1.0
        planned = start + seconds * factor * self._group.slowness(start)
        self.end = max(planned, done)
        return Service(start, self.end, done > planned)
