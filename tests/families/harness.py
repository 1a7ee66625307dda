"""A family held against transformers: what each family's test module calls with its tiny random checkpoint.

All in one process, in float32, without a daemon; a module takes some seconds.
"""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors import safe_open

from epdd import checkpoint, families, wire
from epdd.dispatch.request import Image as RequestImage
from epdd.errors import MediaError
from epdd.families.files import Fields
from epdd.frontend.requests.messages import Conversation, ImageRef, Message
from epdd.frontend.text.prompt import PromptMaker
from epdd.worker.vision.inputs import INPUTS
from tests.models import checkpoints
from tests.worker.language import pd
from tests.worker.vision import test_encoder

SIZES = [(100, 60), (56, 56), (300, 40), (22, 3), (333, 251), (120, 200)]
BUDGETS = (16, 64, 4096)        # tokens of a step: chunks that end inside images, and whole prompts


def check_folder(folder: str) -> None:
    """The look finds nothing wrong, and the family's list of tensors is the checkpoint's."""
    found = checkpoint.look(folder)
    assert found.family == families.load(folder) or found.family.parameters != (0, 0)
    family, stored = families.at(folder), {}
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored |= {family.canonical(name): tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    wanted = family.expected(Fields(Path(folder) / "config.json"))
    assert stored.keys() == {name for name in wanted.shapes if name in stored or not wanted.tied}
    assert [name for name, shape in stored.items() if not wanted.fits(name, shape)] == []
    whole = checkpoints.whole_model(folder)
    vision = sum(value.numel() for name, value in whole.named_parameters() if family.is_vision(name))
    assert found.family.parameters == (vision, sum(value.numel() for value in whole.parameters()) - vision)


def check_counts(folder: str, count: int = 2000) -> None:
    """Patches of images of random sizes, as transformers' processor counts them; what it refuses is refused."""
    info, processor, rng = families.load(folder), checkpoints.image_processor(folder), random.Random(0)
    refused = 0
    for i in range(count):
        width, height = (int(2 ** rng.uniform(0, 8 if i % 3 else 12)) for _ in range(2))
        try:
            wanted = processor.get_number_of_image_patches(height, width, {})
        except ValueError:
            refused += 1
            try:
                info.grid(width, height)
            except MediaError:
                continue
            raise AssertionError(f"transformers refuses {width} x {height}") from None
        assert info.patches(info.grid(width, height)) == wanted, (width, height)
    assert refused < count // 2


def check_pixels(folder: str, count: int = 20) -> None:
    """The vision module's input, bit by bit, and the grids."""
    info, rng = families.load(folder), random.Random(1)
    rule = INPUTS[families.at(folder).vision_input](info)
    for i in range(count):
        image = checkpoints.picture(rng.randrange(20, 400), rng.randrange(20, 400), seed=i)
        wanted, grid = checkpoints.image_inputs(folder, [image]), info.grid(*image.size)
        made = rule.arguments(torch.from_numpy(rule.prepare(np.asarray(image), grid)), [grid])
        for key, value in made.items():
            assert torch.equal(value, wanted[key]), (key, image.size)


def check_embeddings(folder: str) -> None:
    """What the encoder writes into leases, several images in a step, before and after its backend is chosen."""
    bench = test_encoder.Bench(folder)
    for round_ in range(2):
        images = [checkpoints.picture(*size, seed=i) for i, size in enumerate(SIZES)]
        leases = [bench.submit(f"{round_} {i}", image) for i, image in enumerate(images)]
        bench.run()
        assert all(isinstance(message, wire.Encoded) for message in bench.sent), bench.sent
        for image, lease in zip(images, leases):
            wanted, _ = pd.embed(folder, image)
            torch.testing.assert_close(bench.read(lease), wanted, atol=1e-4, rtol=1e-4)
        if not round_:
            ready = bench.encoder.warm_up(lambda done: None)
            assert ready.samples and ready.backend


def check_answers(folder: str) -> None:
    """Tokens of `generate`: text, one image, several of different sizes, interleaved, all at once, in any chunks."""
    picture = checkpoints.picture
    parts: dict[str, list[int | Image.Image]] = {
        "text": [40],
        "image": [5, picture(100, 60), 7],
        "other image": [5, picture(100, 60, seed=9), 7],
        "images": [4, *(part for i, size in enumerate(SIZES) for part in (picture(*size, seed=i), 1)), 5],
        "interleaved": [3, picture(200, 90), 30, picture(60, 150, seed=3), 25, picture(56, 56, seed=4), 2]}
    prompts = {name: pd.prompt(folder, each, seed=1) for name, each in parts.items()}
    wanted = {name: checkpoints.reference_generate(folder, prompt.tokens, prompt.images, 12)
              for name, prompt in prompts.items()}
    assert len(set(map(tuple, wanted.values()))) == len(wanted), "answers that do not depend on the images show nothing"
    for budget in BUDGETS:
        bench = pd.Bench(folder, max_batched_tokens=budget)
        for name, prompt in prompts.items():
            bench.submit(name, prompt)
        assert bench.run() == wanted, budget


def check_prompt(folder: str) -> None:
    """The daemon's tokens of a conversation: those of transformers, each placeholder replaced by its expansion."""
    info = families.load(folder)
    sizes = [(100, 60), (300, 200)]
    parts: list[str | ImageRef] = ["what is", ImageRef("", ""), "on the left of", ImageRef("", ""), "?"]
    with ThreadPoolExecutor(1) as executor:
        maker = PromptMaker(info, checkpoint.look(folder).prompts, executor)
        images = [RequestImage(b"", *size, grid, info.rows(grid), "") for size in sizes if (grid := info.grid(*size))]
        made = asyncio.run(maker.make(Conversation([Message("user", parts)]), images, info.max_model_len))
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    rendered = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False)
    wanted: list[int] = []
    left = iter(images)
    for token in rendered:
        wanted += info.expand(next(left).grid).ids if token == info.placeholder else [token]
    assert made.tokens == wanted
    for span, image in zip(made.spans, images):
        placed = wire.Span(span.start, image.rows, image.grid, wire.Lease(0, 1), "float32", "", span.runs)
        tokens = [token for start, count in placed.places for token in made.tokens[start:start + count]]
        assert tokens == [info.image_token_id] * image.rows
