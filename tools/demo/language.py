"""Second stage: the language model learns to answer from the trained tower's embeddings."""

import logging
import random
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration

from tools.demo import dialogue, world as world
from tools.demo.learn import Teacher
from tools.demo.lessons import COLOURS, CROWDED, LONE, Lessons, Row, Writer, build_pool

log = logging.getLogger("language")

SINGLE_ROWS = 14                # rows a step about one picture, and without any
SEVERAL_IMAGES = 36             # images a step in rows about several pictures
CURRICULUM = 0.3                # share of the steps until all eight images are in use
MIDDLE_LAYER = 1                # layer whose output the extra heads read
PLACE_WEIGHT, NAMED_WEIGHT = 0.3, 0.3
REPORT_EVERY = 100
PROBE_ROWS = 120


@dataclass(frozen=True)
class Said:
    """Logits before each token of an answer, the token, its row, and the losses of the extra heads."""

    logits: Tensor
    truth: Tensor
    row: Tensor
    place_loss: Tensor
    named_loss: Tensor

    def loss(self) -> Tensor:
        """Each row's weight is the root of its length, so that rows with a single answer count beside
        rows with a dozen."""
        weight = self.row.bincount()[self.row] ** -0.5
        each = F.cross_entropy(self.logits, self.truth, reduction="none")
        return (each * weight).sum() / weight.sum()


class Student(nn.Module):
    """The language half, with two heads that exist in training only.

    One says to which image a token belongs, so that counting images, which every list needs, is
    learnt separately.  The other says, if a question names a shape, which colour it has: without
    it, only the answer's token would teach the lookup.
    """

    def __init__(self, model: Qwen3VLForConditionalGeneration, writer: Writer) -> None:
        super().__init__()
        self.text, self.lm_head = model.model.language_model, model.lm_head
        self.writer = writer
        width = model.config.text_config.hidden_size
        self.heads = nn.ModuleList([nn.Linear(width, dialogue.IMAGES_MAX),
                                    nn.Linear(width, len(COLOURS))])

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
        hook = self.text.layers[MIDDLE_LAYER].register_forward_hook(
            lambda layer, given, output: middle.append(output))
        hidden = self.text(inputs_embeds=hidden, attention_mask=mask[:, None],
                           position_ids=positions, visual_pos_masks=seen,
                           deepstack_visual_embeds=deepstack, use_cache=False).last_hidden_state
        hook.remove()
        if deepstack:
            places = torch.tensor([place for row in rows for place in range(len(row.images))])
            sizes = torch.tensor([pool.spans[image][1] - pool.spans[image][0] for image in shown])
            place_loss = F.cross_entropy(self.heads[0](middle[0][seen]),
                                         places.repeat_interleave(sizes))
        named = [(number, at, colour) for number, row in enumerate(rows)
                 for at, colour in row.named]
        named_loss = torch.zeros(())
        if named:
            number, at, colour = torch.tensor(named).T
            named_loss = F.cross_entropy(self.heads[1](middle[0][number, at]), colour)
        next_is_answer = learn[:, 1:]
        return Said(self.lm_head(hidden[:, :-1][next_is_answer]), ids[:, 1:][next_is_answer],
                    next_is_answer.nonzero()[:, 0], place_loss, named_loss)


def train(model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, steps: int
          ) -> None:
    started = time.monotonic()
    writer = Writer(tokenizer, build_pool(model.model.visual))
    log.info("pool of %d pictures seconds %.0f", LONE + CROWDED, time.monotonic() - started)
    lessons, student = Lessons(writer), Student(model, writer)
    teacher = Teacher(student, steps)
    sums = torch.zeros(4)
    for step in range(steps):
        rng = world.train_rng("language", step)
        most = 2 + round((dialogue.IMAGES_MAX - 2) * min(1.0, step / steps / CURRICULUM))
        count = rng.randint(2, most)
        batches = [[lessons.single(rng) for _ in range(SINGLE_ROWS)],
                   [lessons.several(rng, count) for _ in range(SEVERAL_IMAGES // count)]]
        for index, rows in enumerate(batches):
            said = student(rows)
            loss = said.loss()
            (loss + PLACE_WEIGHT * said.place_loss + NAMED_WEIGHT * said.named_loss).backward()
            sums[index] += loss.item()
            sums[3] += said.named_loss.item()
        sums[2] += said.place_loss.item()
        teacher.learn()
        if (step + 1) % REPORT_EVERY == 0:
            log.info("step %d seconds %.0f loss single %.4f several %.4f place %.4f named %.4f %s",
                     step + 1, time.monotonic() - started, *(sums / REPORT_EVERY),
                     probe(lessons, student))
            sums.zero_()


@torch.no_grad()
def probe(lessons: Lessons, student: Student) -> str:
    """Share of answers with every token right, given the right ones before it: as greedy decoding,
    but faster."""
    right, total = Counter[str](), Counter[str]()
    for index in range(PROBE_ROWS):
        rng = random.Random(f"language probe {index}")
        row = lessons.several(rng, dialogue.IMAGES_MAX) if index % 3 else lessons.single(rng)
        said = student([row])
        good, kinds = True, iter(row.kinds)
        for told, token in zip(said.logits.argmax(-1).tolist(), said.truth.tolist()):
            good &= told == token
            if token == student.text.config.eos_token_id:
                kind = next(kinds)
                right[kind], total[kind], good = right[kind] + good, total[kind] + 1, True
    return " ".join(f"{kind} {right[kind] / total[kind]:.2f}" for kind in sorted(total))
