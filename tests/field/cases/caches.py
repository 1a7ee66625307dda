"""D29 to D32: which images are the same."""

from __future__ import annotations

import asyncio
import os
import random

from PIL import Image

from epdd.wire import content_hash
from tests.field.cases import pictures
from tests.field.bench import Bench, asking
from tests.field.table import case

COLOUR = "What colour is the circle?"


def encoded(bench: Bench) -> int:
    """Images that had to be encoded, ever."""
    return int(bench.status()["cache"]["misses"])


@case("D29", "same bytes, different shape", "random 150x30 RGB, and the same buffer as 30x150",
      "two keys, two encodings, two answers")
async def shapes(bench: Bench) -> None:
    pixels = random.Random(29).randbytes(150 * 30 * 3)
    wide, high = (pictures.file(Image.frombytes("RGB", size, pixels)) for size in ((150, 30), (30, 150)))
    before = encoded(bench)
    await bench.other_view(wide, high)
    # The processor's options belong to the key as well.
    assert (await bench.ask(wide, "What is this?", mm_processor_kwargs={"max_pixels": 4096})).status == 200
    assert encoded(bench) == before + 3


@case("D30", "same question, other image; same image, other question", "and 10,000 random files",
      "never another's answer; the second pair is encoded once; no two keys are equal")
async def identities(bench: Bench) -> None:
    red, blue = pictures.circle("red", 111), pictures.circle("blue", 111)
    before = encoded(bench)
    assert [await bench.answers(image, COLOUR) for image in (red, blue)] == ["red", "blue"]
    assert await bench.answers(red, "What shape is this?") == "circle"
    assert encoded(bench) == before + 2
    keys = {content_hash(os.urandom(64)) for _ in range(10_000)}
    assert len(keys) == 10_000 and min(len(key) for key in keys) * 4 >= 128


@case("D31", "fails after its image is in the cache",
      "image and too long a text; the encoders die; the same image again",
      "400, then 200 both times", kills=("encoder/0", "encoder/1"))
async def after_failure(bench: Bench) -> None:
    image = pictures.circle("blue", 103)
    await bench.refused("context_length_exceeded", image, "word " * 20_000)
    assert await bench.answers(image, COLOUR) == "blue"
    await bench.refused("context_length_exceeded", image, "word " * 20_000)
    gone = {bench.kill(name) for name in ("encoder/0", "encoder/1")}
    await bench.until(lambda status: not gone & {w["pid"] for w in status["workers"]})
    assert await bench.answers(image, COLOUR) == "blue"
    assert await bench.answers(pictures.circle("green", 103), COLOUR) == "green"      # waits for an encoder
    await bench.ready()


@case("D32", "eight identical images at once, the first leaves", "while the encoders are stopped",
      "the other seven are right; encoded once or twice")
async def single_flight(bench: Bench) -> None:
    before = encoded(bench)
    body = asking(pictures.circle("green", 105), COLOUR)
    async with bench.frozen("encoder/0", "encoder/1"):
        first = asyncio.create_task(bench.post(body))
        await bench.until(lambda status: status["arena"]["pinned_bytes"])
        others = [asyncio.create_task(bench.post(body)) for _ in range(7)]
        # The neighbour's stream is one more.
        await bench.until(lambda status: status["requests"]["running"] >= 8 and status["cache"]["joined"] >= 7)
        first.cancel()
        await asyncio.wait([first])
    assert [reply.said for reply in await asyncio.gather(*others)] == ["green"] * 7
    assert 1 <= encoded(bench) - before <= 2
