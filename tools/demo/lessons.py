"""The second stage's lessons: talks about pictures from a pool, as rows of tokens.

The tower is frozen, so the pool goes through it once; talks are then made of pictures from it,
thousands of combinations a minute.  Talks with the same beginning share their images in one
row: each is a branch that attends to the beginning and itself only.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from tools.demo import checkpoint, dialogue, world as world

LONE, CROWDED = 14000, 8000     # pictures in the pool: of one shape, of two to four
TEXT_ONLY = 0.12                # share of rows without a picture among those about one
QUESTION_FIRST, GROWING = 0.2, 0.08
COLOURS = list(world.COLOURS)


@dataclass(frozen=True)
class Pool:
    """Scenes without their pixels, and the tower's rows for them: [rows, 3, 128]."""

    scenes: list[world.Scene]
    grids: list[tuple[int, int]]
    spans: list[tuple[int, int]]
    rows: Tensor


@dataclass(frozen=True)
class Row:
    """Talks with the same beginning, as arrays over their tokens; branch 0 is the beginning."""

    ids: list[int]
    learn: list[bool]
    branch: list[int]
    positions: np.ndarray
    images: list[int]
    kinds: list[str]
    named: list[tuple[int, int]]  # where a question names a shape, and that shape's colour


def build_pool(visual: nn.Module) -> Pool:
    """Single shapes first."""
    rngs = [world.train_rng("pool", index) for index in range(LONE + CROWDED)]
    return fill_pool(visual, (
        world.draw_scene(rng, 1 if index < LONE else rng.randint(2, world.SHAPES_MAX))
        for index, rng in enumerate(rngs)))


@torch.no_grad()
def fill_pool(visual: nn.Module, drawn: Iterable[world.Scene], dtype: torch.dtype = torch.float16
              ) -> Pool:
    scenes, grids, spans, rows, at = [], [], [], [], 0
    for scene in drawn:
        frames, height, width = checkpoint.patches(scene.image)
        features = checkpoint.see(visual, frames[None], height, width)
        rows.append(torch.stack([feature[0] for feature in features], 1).to(dtype))
        spans.append((at, at + len(rows[-1])))
        at += len(rows[-1])
        grids.append((height // world.MERGE, width // world.MERGE))
        scenes.append(replace(scene, image=Image.new("RGB", (1, 1))))
    return Pool(scenes, grids, spans, torch.cat(rows))


class Writer:
    """Talks to rows of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, pool: Pool) -> None:
        self.tokenizer, self.pool = tokenizer, pool
        self.image, self.image_end = tokenizer.convert_tokens_to_ids(
            ["<|image_pad|>", "<|vision_end|>"])
        self.shapes = {tokenizer.encode(f" {shape}", add_special_tokens=False)[0]
                       for shape in world.SHAPES}

    def row(self, talks: list[dialogue.Talk], images: list[int]) -> Row:
        """`images`: the pool's index of each image of the talks."""
        encoded = [self._encode(talk) for talk in talks]
        ids, learn = encoded[0]
        common = len(ids) - ids[::-1].index(self.image_end) if self.image_end in ids else 0
        kinds = [kind for talk in talks for kind in talk.kinds]
        out, positions, at, shown = Row([], [], [], np.zeros((3, 0)), images, kinds, []), [], 0, 0
        for token, answer in zip(ids[:common], learn[:common]):
            block = np.full((3, 1), at)
            if token == self.image:
                height, width = self.pool.grids[images[shown]]
                down, across = np.divmod(np.arange(height * width), width)
                block = at + np.stack([np.zeros_like(down), down, across])
                at, shown = at + max(height, width) - 1, shown + 1
            self._put(out, [token] * block.shape[1], [answer] * block.shape[1], 0)
            positions.append(block)
            at += 1
        for number, (ids, learn) in enumerate(encoded, 1):
            if talks[number - 1].kinds == ["colour"]:
                colour = COLOURS.index(talks[number - 1].messages[-1]["content"])
                out.named.extend((len(out.ids) + place, colour) for place, token
                                 in enumerate(ids[common:]) if token in self.shapes)
            self._put(out, ids[common:], learn[common:], number)
            positions.append(np.tile(at + np.arange(len(ids) - common), (3, 1)))
        return replace(out, positions=np.concatenate(positions, 1))

    @staticmethod
    def _put(row: Row, ids: list[int], learn: list[bool], branch: int) -> None:
        row.ids.extend(ids)
        row.learn.extend(learn)
        row.branch.extend([branch] * len(ids))

    def _encode(self, talk: dialogue.Talk) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them the model writes."""
        ids: list[int] = []
        learn: list[bool] = []
        for text, answer in checkpoint.chat_text(talk.messages):
            part = self.tokenizer.encode(text, add_special_tokens=False)
            ids += part
            learn += [answer] * len(part)
        return ids, learn


class Lessons:
    """The rows of each step."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.pool = writer, writer.pool

    def single(self, rng: random.Random) -> Row:
        """One picture or none, and all questions about it."""
        if rng.random() < TEXT_ONLY:
            return self.writer.row([dialogue.text_only(rng)], [])
        crowd = rng.random() < 0.6
        first, last = (LONE, LONE + CROWDED) if crowd else (0, LONE)
        images = [rng.randrange(first, last)]
        scenes = [self.pool.scenes[images[0]]]
        kinds = dialogue.askable(scenes)
        if rng.random() < QUESTION_FIRST:
            turn = dialogue.ask(rng, rng.choice(kinds), scenes)
            return self.writer.row([dialogue.question_first(rng, scenes, turn)], images)
        kinds += ["colour", "colour"] if "colour" in kinds and crowd else ["item", "images"]
        turns = [[dialogue.ask(rng, kind, scenes)] for kind in kinds]
        turns.append([dialogue.ask(rng, rng.choice(kinds), scenes) for _ in range(3)])
        return self.writer.row(dialogue.branches(rng, scenes, turns), images)

    def several(self, rng: random.Random, count: int) -> Row:
        """Pictures of one shape each: the whole list, and single items of it."""
        images = [rng.randrange(LONE) for _ in range(count)]
        scenes = [self.pool.scenes[image] for image in images]
        dice = rng.random()
        if dice < GROWING:
            return self.writer.row([dialogue.growing(rng, scenes)], images)
        if dice < GROWING + QUESTION_FIRST:
            turn = dialogue.ask(rng, rng.choice(["list", "list", "item"]), scenes)
            return self.writer.row([dialogue.question_first(rng, scenes, turn)], images)
        kinds = ["list", "list", "images"] + ["item"] * count
        turns = [[dialogue.ask(rng, kind, scenes)] for kind in kinds]
        turns.append([dialogue.ask(rng, rng.choice(kinds), scenes) for _ in range(2)])
        return self.writer.row(dialogue.branches(rng, scenes, turns), images)
