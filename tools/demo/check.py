"""Checks at the start that the training's shortcuts compute what transformers does."""

import torch
from torch import Tensor
from transformers import (PreTrainedTokenizerFast, Qwen2VLImageProcessorPil,
                          Qwen3VLForConditionalGeneration)

from tools.demo import checkpoint, dialogue, language, lessons, world as world

TOLERANCE = 1e-5    # float32 sums in another order; the first logits are near 0.2
EXAMPLES = 8


@torch.no_grad()
def check(model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast,
          processor: Qwen2VLImageProcessorPil) -> float:
    """The greatest difference of a logit between a row of branches and each talk alone."""
    worst = 0.0
    for index in range(EXAMPLES):
        rng = world.train_rng("check", index)
        scenes = [world.draw_scene(rng, 1) for _ in range(2 + index % 3)]
        talks = [dialogue.growing(rng, scenes)]
        if index % 2:
            turns = [[dialogue.ask(rng, kind, scenes)] for kind in dialogue.askable(scenes)]
            talks = dialogue.branches(rng, scenes, turns)
        pool = lessons.fill_pool(model.model.visual, scenes, torch.float32)
        writer = lessons.Writer(tokenizer, pool)
        ours = language.Student(model, writer)(
            [writer.row(talks, list(range(len(scenes))))]).logits
        theirs = torch.cat([_theirs(model, processor, writer, talk, scenes) for talk in talks])
        worst = max(worst, (ours - theirs).abs().max().item())
    if worst > TOLERANCE:
        raise SystemExit(f"the training's forward differs from transformers' by {worst}")
    return worst


def _theirs(model: Qwen3VLForConditionalGeneration, processor: Qwen2VLImageProcessorPil,
            writer: lessons.Writer, talk: dialogue.Talk, scenes: list[world.Scene]
            ) -> Tensor:
    """Logits before each answer, from text and pixels by transformers alone."""
    row = writer.row([talk], list(range(len(scenes))))
    inputs = checkpoint.inputs(writer.tokenizer, processor, talk.messages,
                               [scene.image for scene in scenes])
    if inputs["input_ids"][0].tolist() != row.ids:
        raise SystemExit("the training's tokens differ from the chat template's")
    return model(**inputs).logits[0, :-1][torch.tensor(row.learn[1:])]
