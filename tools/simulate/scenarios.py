"""Fleets, request mixes and arrivals for the simulator and the live benchmarks.  Equal seeds give equal requests."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from tools.simulate.simulator import Encoder, Request

from epdd import emulation, families
from epdd.emulated_time import EncoderGroup, Formula, Slow

# Qwen3-VL's: pixels a side of a patch, patches a side of a row, and the pixel limits of an image.
PATCH, MERGE, MIN_PIXELS, MAX_PIXELS = 16, 2, 65536, 16777216

FULL_HD, FOUR_K = (1920, 1080), (3840, 2160)
# From a thumbnail to 4K; each equally likely in the mixed scenario.
SIZES = [(224, 224), (448, 448), (800, 600), (1024, 1024), (1280, 720), FULL_HD, (2560, 1440), FOUR_K]

# The fleet of the published measurements: seconds of an image of any size.
TABLE_FLEET = "gpu:1@0.11,cpu:4@1.32"
# The same with time by patches, an eighth of it by their square as in attention: 0.11 s and 1.32 s for 1080p.
MIXED_FLEET = "gpu:1@0.001/1.17e-5/2.0e-10,cpu:4@0.012/1.40e-4/2.4e-9"

Size = tuple[int, int]                              # width and height in pixels
Sized = Callable[[random.Random], tuple[Size, ...]]     # one request's images
Mix = Callable[[random.Random], tuple[int, ...]]    # their patches

_GROUP = re.compile(r"(cpu|gpu):(\d+)@([0-9.e-]+)(?:/([0-9.e-]+))?(?:/([0-9.e-]+))?"
                    r"(?:x([0-9.]+)after([0-9.]+))?(?:~([0-9.]+))?")


@cache
def patches(width: int, height: int) -> int:
    """Patches of an image of this size, by Qwen3-VL's rule."""
    return math.prod(_FAMILY.grid(width, height, MIN_PIXELS, MAX_PIXELS))


_FAMILY = replace(families.load(str(families.DEMO)), patch=PATCH, merge=MERGE)


# --- fleets

def fleet(text: str) -> list[Encoder]:
    """Encoders of a profile (its name, or a TOML file), or of `gpu:1@0.11,cpu:4@1.32`.

    In the short form a group is KIND:COUNT@A[/B[/C]][xFACTORafterSECONDS][~JITTER]: seconds of an image are
    A + B * patches + C * patches^2, FACTOR times that from SECONDS on, with a lognormal jitter of that sigma.
    """
    groups = _groups(text) if "@" in text else list(emulation.read(text).encoder)
    everyone = [group for group in groups for _ in range(group.count)]
    return [Encoder(f"encoder/{i}", group) for i, group in enumerate(everyone)]


def _groups(text: str) -> list[EncoderGroup]:
    groups = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise SystemExit(f"--fleet: {part!r} is not KIND:COUNT@A[/B[/C]][xFACTORafterSECONDS][~JITTER]")
        kind, number, a, b, c, factor, after, jitter = match.groups()
        groups.append(EncoderGroup(
            kind="cpu" if kind == "cpu" else "gpu", count=int(number),
            seconds=Formula(float(a), float(b or 0), float(c or 0)), jitter=float(jitter or 0),
            slow=(Slow(float(after), float(factor)),) if factor else ()))
    return groups


def size(text: str) -> Size:
    """Pixels of WIDTHxHEIGHT."""
    try:
        width, height = map(int, text.split("x"))
    except ValueError:
        raise SystemExit(f"{text!r} is not WIDTHxHEIGHT") from None
    return width, height


def names(encoders: Sequence[Encoder], kind: str) -> list[str]:
    return [encoder.name for encoder in encoders if encoder.group.kind == kind]


def capacity(encoders: Sequence[Encoder], mix: Mix, samples: int = 2000) -> float:
    """Requests a second that the fleet can do at most, slowdowns aside."""
    rng = random.Random(0)
    requests = [mix(rng) for _ in range(samples)]
    images = [size for request in requests for size in request]
    if not images:
        return math.inf
    mean = [sum(encoder.group.image_seconds(size) for size in images) / len(images) for encoder in encoders]
    return sum(1 / seconds for seconds in mean) / (len(images) / samples)


# --- request mixes

def equal_sizes(images: int, size: tuple[int, int] = FULL_HD) -> Sized:
    """A constant number of images of one size."""
    request = (size,) * images
    return lambda rng: request


def mixed_sizes(low: int = 1, high: int = 8, sizes: Sequence[Size] = SIZES, text_share: float = 0.0) -> Sized:
    """`low` to `high` images, each of any of `sizes`; `text_share` of the requests have none."""
    def draw(rng: random.Random) -> tuple[Size, ...]:
        if rng.random() < text_share:
            return ()
        return tuple(rng.choice(sizes) for _ in range(rng.randint(low, high)))
    return draw


def in_patches(sized: Sized) -> Mix:
    return lambda rng: tuple(patches(*size) for size in sized(rng))


def equal(images: int, size: Size = FULL_HD) -> Mix:
    """`equal_sizes`, in patches."""
    return in_patches(equal_sizes(images, size))


def mixed(low: int = 1, high: int = 8, sizes: Sequence[Size] = SIZES, text_share: float = 0.0) -> Mix:
    """`mixed_sizes`, in patches."""
    return in_patches(mixed_sizes(low, high, sizes, text_share))


def draws(sized: Sized, count: int, seed: int) -> list[tuple[Size, ...]]:
    """The images' sizes in the requests that `poisson` makes with this mix and seed."""
    rng = _sizes_of(seed)
    return [sized(rng) for _ in range(count)]


def _sizes_of(seed: int) -> random.Random:
    return random.Random(f"sizes {seed}")


# --- arrivals

def poisson(rate: float, count: int, mix: Mix, seed: int, burst: int = 1) -> list[Request]:
    """`rate` requests a second, singly or `burst` at once.

    With the same seed, other rates give the same arrivals closer together, and other mixes the same arrivals.
    """
    times, sizes = random.Random(f"arrivals {seed}"), _sizes_of(seed)
    requests: list[Request] = []
    now = 0.0
    while len(requests) < count:
        now += times.expovariate(1.0) * burst / rate
        requests += [Request(now, mix(sizes)) for _ in range(min(burst, count - len(requests)))]
    return requests


def recorded(path: Path) -> list[Request]:
    """JSON lines: {"at": seconds, "images": [[width, height], ...]}."""
    requests = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
            requests.append(Request(float(entry["at"]), tuple(patches(*size) for size in entry["images"])))
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}:{number}: {error!r}") from None
    return sorted(requests)
