"""Measure the shipped demo model and write the table into its card: python -m tools.demo.evaluate

Each answer is generated greedily by transformers from text and pixels, and counts only if every
character is right.  Pictures and questions have other seeds than all training.
"""

import argparse
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from transformers import (AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerFast,
                          Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration)

from tools.demo import checkpoint, dialogue, world as world

DEMO = Path(__file__).resolve().parents[2] / "epdd" / "demo"
NEW_TOKENS_MAX = 64     # a list of eight images takes 47
BATCH = 20
Asked = tuple[list[dialogue.Message], list[Image.Image]]
TABLE = re.compile(r"(<!-- accuracy -->\n).*(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Case:
    """One row of the table: how many images, and how many shapes in each."""

    name: str
    kind: str
    images: tuple[int, int]
    shapes: tuple[int, int] = (1, 1)
    large: bool = False

    def draw(self, rng: random.Random) -> list[world.Scene]:
        scenes = []
        for _ in range(rng.randint(*self.images)):
            size = rng.choice(world.LARGE_SIZES) if self.large else None
            scene = world.draw_scene(rng, rng.randint(*self.shapes), size)
            while self.kind not in dialogue.askable([scene]) and self.images == (1, 1):
                scene = world.draw_scene(rng, rng.randint(*self.shapes), size)
            scenes.append(scene)
        return scenes


CASES = [
    Case("colour of a shape, of 1 to 4", "colour", (1, 1), (1, 4)),
    Case("kind of a lone shape", "shape", (1, 1)),
    Case("number of shapes, 1 to 4", "count", (1, 1), (1, 4)),
    Case("description of 1 to 4 shapes", "describe", (1, 1), (1, 4)),
    Case("list of 1 to 8 images", "list", (1, 8)),
    Case("list of 8 images", "list", (8, 8)),
    Case("list of 2 large images (640x480 to 1920x1080)", "list", (2, 2), large=True),
    Case("one image of 2 to 8", "item", (2, 8)),
    Case("number of images, 2 to 8", "images", (2, 8)),
    Case("talk without images", "talk", (0, 0)),
]


class Model:
    """The shipped weights, in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
        self.processor: Qwen2VLImageProcessorPil = AutoImageProcessor.from_pretrained(
            folder, backend="pil")
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def answers(self, asked: list[Asked]) -> list[str]:
        """Answers to one batch, padded on the left."""
        each = [checkpoint.inputs(self.tokenizer, self.processor, messages, images, ask=True)
                for messages, images in asked]
        lengths = [inputs["input_ids"].shape[1] for inputs in each]
        length = max(lengths)
        batch = {name: torch.cat([
            F.pad(inputs[name], (length - own, 0), value=padding)
            for own, inputs in zip(lengths, each)]) for name, padding in [
                ("input_ids", self.tokenizer.pad_token_id), ("mm_token_type_ids", 0)]}
        batch["attention_mask"] = torch.stack([
            torch.arange(length) >= length - own for own in lengths]).long()
        for name in ("pixel_values", "image_grid_thw"):
            if name in each[0]:
                batch[name] = torch.cat([inputs[name] for inputs in each])
        tokens = self.model.generate(**batch, max_new_tokens=NEW_TOKENS_MAX)
        said: list[str] = self.tokenizer.batch_decode(tokens[:, length:], skip_special_tokens=True)
        return said


def measure(model: Model, case: Case, samples: int, show_wrong: bool) -> float:
    """The share of exactly right answers."""
    right = 0
    for start in range(0, samples, BATCH):
        asked, truths = [], []
        for index in range(start, min(start + BATCH, samples)):
            rng = world.eval_rng(case.name, index)
            scenes = case.draw(rng)
            *messages, truth = dialogue.single_turn(rng, case.kind, scenes).messages
            asked.append((messages, [scene.image for scene in scenes]))
            truths.append(truth["content"])
        for (messages, _), told, truth in zip(asked, model.answers(asked), truths):
            right += told == truth
            if show_wrong and told != truth:
                print(f"  {case.kind}: {messages[-1]['content']}\n"
                      f"    said {told!r}, true {truth!r}")
    return right / samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO, help="folder of the model")
    parser.add_argument("--samples", type=int, default=500, help="questions of each kind")
    parser.add_argument("--show-wrong", action="store_true", help="print each wrong answer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, started = Model(args.model), time.monotonic()
    lines = [f"| Question ({args.samples} new ones each) | Exactly right |", "|---|---|"]
    for case in CASES:
        lines.append(f"| {case.name} | {measure(model, case, args.samples, args.show_wrong):.1%} |")
        print(lines[-1], f"after {time.monotonic() - started:.0f} s", flush=True)
    card = args.model / "README.md"
    card.write_text(TABLE.sub(lambda found: found[1] + "\n".join(lines) + "\n" + found[2],
                              card.read_text()))


if __name__ == "__main__":
    main()
