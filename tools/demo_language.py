"""Second stage: the language model learns to talk about what the trained tower sees.

The tower is frozen, so a pool of pictures goes through it once; talks are then made of pictures
from the pool, thousands of combinations a minute.  Several talks that begin alike share their
images in one row: each is a branch that sees the common beginning and itself, nothing else.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration

import demo_model
import demo_talk
import demo_world as world
from demo_learn import Teacher

log = logging.getLogger("language")

LONE, CROWDED = 14000, 8000     # pictures in the pool: of one shape, of two to four
SINGLE_ROWS = 14                # rows a step about one picture, and without any
SEVERAL_IMAGES = 36             # images a step in rows about several pictures
TEXT_ONLY = 0.12                # share of the single rows
QUESTION_FIRST, GROWING = 0.2, 0.08
CURRICULUM = 0.3                # share of the steps until all eight images are in use
PLACE_LAYER, PLACE_WEIGHT = 1, 0.3
REPORT_EVERY = 100
PROBE_ROWS = 120


@dataclass(frozen=True)
class Pool:
    """Scenes without their pixels, and the tower's rows for them: [rows, 3, 128]."""

    scenes: list[world.Scene]
    grids: list[tuple[int, int]]
    spans: list[tuple[int, int]]
    rows: Tensor


@dataclass(frozen=True)
class Row:
    """Talks that begin alike, as arrays over their tokens; branch 0 is the common beginning."""

    ids: list[int]
    learn: list[bool]
    branch: list[int]
    positions: np.ndarray
    images: list[int]
    kinds: list[str]


def build_pool(visual: nn.Module) -> Pool:
    """Lone shapes first."""
    rngs = [world.train_rng("pool", index) for index in range(LONE + CROWDED)]
    return fill_pool(visual, (
        world.draw_scene(rng, 1 if index < LONE else rng.randint(2, world.SHAPES_MAX))
        for index, rng in enumerate(rngs)))


@torch.no_grad()
def fill_pool(visual: nn.Module, drawn: Iterable[world.Scene], dtype: torch.dtype = torch.float16
              ) -> Pool:
    scenes, grids, spans, rows, at = [], [], [], [], 0
    for scene in drawn:
        frames, height, width = demo_model.patches(scene.image)
        features = demo_model.see(visual, frames[None], height, width)
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

    def row(self, talks: list[demo_talk.Talk], images: list[int]) -> Row:
        """`images`: the pool's index of each image of the talks."""
        encoded = [self._encode(talk) for talk in talks]
        ids, learn = encoded[0]
        common = len(ids) - ids[::-1].index(self.image_end) if self.image_end in ids else 0
        kinds = [kind for talk in talks for kind in talk.kinds]
        out, positions, at, shown = Row([], [], [], np.zeros((3, 0)), images, kinds), [], 0, 0
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
            self._put(out, ids[common:], learn[common:], number)
            positions.append(np.tile(at + np.arange(len(ids) - common), (3, 1)))
        return replace(out, positions=np.concatenate(positions, 1))

    @staticmethod
    def _put(row: Row, ids: list[int], learn: list[bool], branch: int) -> None:
        row.ids.extend(ids)
        row.learn.extend(learn)
        row.branch.extend([branch] * len(ids))

    def _encode(self, talk: demo_talk.Talk) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them are the model's to say."""
        ids: list[int] = []
        learn: list[bool] = []
        for text, answer in demo_model.chat_text(talk.messages):
            part = self.tokenizer.encode(text, add_special_tokens=False)
            ids += part
            learn += [answer] * len(part)
        return ids, learn


class Lessons:
    """What is talked about at each step."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.pool = writer, writer.pool

    def single(self, rng: random.Random) -> Row:
        """One picture and all that can be asked of it, or none."""
        if rng.random() < TEXT_ONLY:
            return self.writer.row([demo_talk.text_only(rng)], [])
        crowd = rng.random() < 0.6
        first, last = (LONE, LONE + CROWDED) if crowd else (0, LONE)
        images = [rng.randrange(first, last)]
        scenes = [self.pool.scenes[images[0]]]
        kinds = demo_talk.askable(scenes)
        if rng.random() < QUESTION_FIRST:
            turn = demo_talk.ask(rng, rng.choice(kinds), scenes)
            return self.writer.row([demo_talk.question_first(rng, scenes, turn)], images)
        kinds += ["colour", "colour"] if "colour" in kinds and crowd else ["item", "images"]
        turns = [[demo_talk.ask(rng, kind, scenes)] for kind in kinds]
        turns.append([demo_talk.ask(rng, rng.choice(kinds), scenes) for _ in range(3)])
        return self.writer.row(demo_talk.branches(rng, scenes, turns), images)

    def several(self, rng: random.Random, count: int) -> Row:
        """Pictures of one shape each: the whole list, and single items of it."""
        images = [rng.randrange(LONE) for _ in range(count)]
        scenes = [self.pool.scenes[image] for image in images]
        dice = rng.random()
        if dice < GROWING:
            return self.writer.row([demo_talk.growing(rng, scenes)], images)
        if dice < GROWING + QUESTION_FIRST:
            turn = demo_talk.ask(rng, rng.choice(["list", "list", "item"]), scenes)
            return self.writer.row([demo_talk.question_first(rng, scenes, turn)], images)
        kinds = ["list", "list", "images"] + ["item"] * count
        turns = [[demo_talk.ask(rng, kind, scenes)] for kind in kinds]
        turns.append([demo_talk.ask(rng, rng.choice(kinds), scenes) for _ in range(2)])
        return self.writer.row(demo_talk.branches(rng, scenes, turns), images)


@dataclass(frozen=True)
class Said:
    """Logits where an answer's token comes next, that token, the row it is in, and the loss of
    the extra head."""

    logits: Tensor
    truth: Tensor
    row: Tensor
    place_loss: Tensor

    def loss(self) -> Tensor:
        """A row with a single answer would drown among rows with a dozen: each row weighs by the
        root of its length."""
        weight = self.row.bincount()[self.row] ** -0.5
        each = F.cross_entropy(self.logits, self.truth, reduction="none")
        return (each * weight).sum() / weight.sum()


class Student(nn.Module):
    """The language half, with a head that exists in training only: which image is this token's?
    It makes counting images, on which every list rests, something to learn by itself."""

    def __init__(self, model: Qwen3VLForConditionalGeneration, writer: Writer) -> None:
        super().__init__()
        self.text, self.lm_head = model.model.language_model, model.lm_head
        self.writer = writer
        self.heads = nn.Linear(model.config.text_config.hidden_size, demo_talk.IMAGES_MAX)

    def forward(self, rows: list[Row]) -> Said:
        length = max(len(row.ids) for row in rows)
        ids, learn, branch = (torch.tensor([
            list(getattr(row, name)) + [pad] * (length - len(row.ids)) for row in rows])
            for name, pad in [("ids", 0), ("learn", False), ("branch", -1)])
        positions = torch.from_numpy(np.stack([
            np.pad(row.positions, ((0, 0), (0, length - len(row.ids)))) for row in rows], 1))
        mask = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
        mask &= torch.ones(length, length, dtype=torch.bool).tril()
        seen = ids == self.writer.image
        hidden, place_loss = self.text.embed_tokens(ids), torch.zeros(())
        deepstack = None
        if seen.any():
            pool = self.writer.pool
            shown = [image for row in rows for image in row.images]
            features = torch.cat([pool.rows[slice(*pool.spans[image])] for image in shown]).float()
            main, *deepstack = features.unbind(1)
            hidden = hidden.masked_scatter(seen[..., None], main)
        middle: list[Tensor] = []
        hook = self.text.layers[PLACE_LAYER].register_forward_hook(
            lambda layer, given, output: middle.append(output))
        hidden = self.text(inputs_embeds=hidden, attention_mask=mask[:, None],
                           position_ids=positions, visual_pos_masks=seen,
                           deepstack_visual_embeds=deepstack, use_cache=False).last_hidden_state
        hook.remove()
        if deepstack:
            places = torch.tensor([place for row in rows for place in range(len(row.images))])
            sizes = torch.tensor([pool.spans[image][1] - pool.spans[image][0] for image in shown])
            place_loss = F.cross_entropy(self.heads(middle[0][seen]),
                                         places.repeat_interleave(sizes))
        next_is_answer = learn[:, 1:]
        return Said(self.lm_head(hidden[:, :-1][next_is_answer]), ids[:, 1:][next_is_answer],
                    next_is_answer.nonzero()[:, 0], place_loss)


def train(model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, steps: int
          ) -> None:
    started = time.monotonic()
    writer = Writer(tokenizer, build_pool(model.model.visual))
    log.info("pool of %d pictures seconds %.0f", LONE + CROWDED, time.monotonic() - started)
    lessons, student = Lessons(writer), Student(model, writer)
    teacher = Teacher(student, steps)
    sums = torch.zeros(3)
    for step in range(steps):
        rng = world.train_rng("language", step)
        most = 2 + round((demo_talk.IMAGES_MAX - 2) * min(1.0, step / steps / CURRICULUM))
        count = rng.randint(2, most)
        batches = [[lessons.single(rng) for _ in range(SINGLE_ROWS)],
                   [lessons.several(rng, count) for _ in range(SEVERAL_IMAGES // count)]]
        for index, rows in enumerate(batches):
            said = student(rows)
            loss = said.loss()
            (loss + PLACE_WEIGHT * said.place_loss).backward()
            sums[index] += loss.item()
        sums[2] += said.place_loss.item()
        teacher.learn()
        if (step + 1) % REPORT_EVERY == 0:
            log.info("step %d seconds %.0f loss single %.4f several %.4f place %.4f %s", step + 1,
                     time.monotonic() - started, *(sums / REPORT_EVERY), probe(lessons, student))
            sums.zero_()


@torch.no_grad()
def probe(lessons: Lessons, student: Student) -> str:
    """Share of answers with every token right, given the right ones before it: what greedy
    decoding would say, at a fraction of the price."""
    right, total = Counter[str](), Counter[str]()
    for index in range(PROBE_ROWS):
        rng = random.Random(f"language probe {index}")
        row = lessons.several(rng, demo_talk.IMAGES_MAX) if index % 3 else lessons.single(rng)
        said = student([row])
        good, kinds = True, iter(row.kinds)
        for told, token in zip(said.logits.argmax(-1).tolist(), said.truth.tolist()):
            good &= told == token
            if token == student.text.config.eos_token_id:
                kind = next(kinds)
                right[kind], total[kind], good = right[kind] + good, total[kind] + 1, True
    return " ".join(f"{kind} {right[kind] / total[kind]:.2f}" for kind in sorted(total))
