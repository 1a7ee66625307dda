"""First stage: the vision tower is trained before the language model.

Through the language loss alone a tower this small hardly learns.  Here heads that exist in
training only predict for every merged token its shape and colour, that shape's place in reading
order, and the number of shapes in the picture.
"""

import logging
import random
import time
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo import checkpoint, world as world
from tools.demo.learn import Teacher

log = logging.getLogger("tower")

GROUPS, GROUP_SIZE = 2, 12      # per step: grids, and pictures on each
COUNTS = [1, 1, 1, 2, 3, 4]     # single shapes, which lists are made of
WIDTHS = [1 + len(world.SHAPES), 1 + len(world.COLOURS), 1 + world.SHAPES_MAX,
          world.SHAPES_MAX]     # the heads' answers: shape, colour, place, count
BACKGROUND_WEIGHT = 0.3
DEEPSTACK_WEIGHT = 0.3
REPORT_EVERY = 200
PROBE = 300                     # pictures of each count


class Pupil(nn.Module):
    """The tower with a head on each of its outputs."""

    def __init__(self, visual: nn.Module, width: int) -> None:
        super().__init__()
        self.visual = visual
        outputs = 1 + len(visual.deepstack_visual_indexes)
        self.heads = nn.ModuleList(nn.Linear(width, sum(WIDTHS)) for _ in range(outputs))

    def forward(self, frames: Tensor, rows: int, columns: int) -> list[Tensor]:
        features = checkpoint.see(self.visual, frames, rows, columns)
        return [head(feature) for head, feature in zip(self.heads, features)]


@dataclass(frozen=True)
class Group:
    """Pictures on one grid, with their labels: [images, tokens, 3] and [images]."""

    frames: Tensor
    rows: int
    columns: int
    labels: Tensor
    counts: Tensor


def train(visual: nn.Module, width: int, steps: int) -> None:
    pupil = Pupil(visual, width)
    teacher = Teacher(pupil, steps)
    started, mean = time.monotonic(), 0.0
    for step in range(steps):
        rng = world.train_rng("tower", step)
        for _ in range(GROUPS):
            size = world.canvas_size(rng)
            [group] = gather([world.draw_scene(rng, rng.choice(COUNTS), size)
                              for _ in range(GROUP_SIZE)])
            answers = pupil(group.frames, group.rows, group.columns)
            loss = sum(weight * _loss(answer, group) for weight, answer in
                       zip([1.0] + [DEEPSTACK_WEIGHT] * len(answers), answers)) / GROUPS
            loss.backward()
            mean += loss.item()
        teacher.learn()
        if (step + 1) % REPORT_EVERY == 0:
            log.info("step %d seconds %.0f loss %.4f %s", step + 1, time.monotonic() - started,
                     mean / REPORT_EVERY, probe(pupil))
            mean = 0.0


def gather(scenes: list[world.Scene]) -> list[Group]:
    """Scenes grouped by their grid."""
    by_grid = defaultdict(list)
    for scene in scenes:
        frames, rows, columns = checkpoint.patches(scene.image)
        labels = world.token_labels(scene, columns // world.MERGE, rows // world.MERGE)
        by_grid[rows, columns].append((frames, torch.from_numpy(labels).flatten(0, 1),
                                       torch.tensor(len(scene.things) - 1)))
    return [Group(torch.stack(frames), rows, columns, torch.stack(labels), torch.stack(counts))
            for (rows, columns), members in by_grid.items()
            for frames, labels, counts in [zip(*members)]]


def _loss(answer: Tensor, group: Group) -> Tensor:
    """Cross entropy of the four answers of every token."""
    *parts, count = answer.split(WIDTHS, -1)
    tokens = answer.shape[1]
    total = F.cross_entropy(count.flatten(0, 1), group.counts.repeat_interleave(tokens))
    for index, part in enumerate(parts):
        weight = torch.ones(part.shape[-1])
        weight[0] = BACKGROUND_WEIGHT
        total = total + F.cross_entropy(part.flatten(0, 1), group.labels[..., index].flatten(),
                                        weight, ignore_index=world.IGNORE)
    return total


@torch.no_grad()
def probe(pupil: Pupil) -> str:
    """Share of new pictures whose every shape is right by the sum over its tokens."""
    report = []
    for number in range(1, world.SHAPES_MAX + 1):
        rng = random.Random(f"tower probe {number}")
        groups = gather([world.draw_scene(rng, number) for _ in range(PROBE)])
        right = torch.zeros(5)
        for group in groups:
            answer = pupil(group.frames, group.rows, group.columns)[0]
            right += _right(answer, group)
        report.append("%d: " % number + " ".join("%.3f" % share for share in right / PROBE))
    return "all shape colour place count, by shapes " + ", ".join(report)


def _right(answer: Tensor, group: Group) -> Tensor:
    *parts, count = answer.split(WIDTHS, -1)
    good = torch.ones(4, len(answer), dtype=torch.bool)
    good[3] = count.mean(1).argmax(-1) == group.counts
    for place in range(1, world.SHAPES_MAX + 1):
        mine = group.labels[..., 2] == place
        for index, part in enumerate(parts):
            told = (part.log_softmax(-1) * mine[..., None]).sum(1).argmax(-1)
            truth = torch.where(mine, group.labels[..., index], 0).amax(1)
            good[index] &= (told == truth) | ~mine.any(1)
    return torch.cat([good.all(0, keepdim=True), good]).sum(1).float()
