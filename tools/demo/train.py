"""Train the demo model from scratch and write it to a folder: python -m tools.demo.train

One core, about an hour.  Everything is seeded: the same machine and versions give the same
weights again.  Afterwards tools/demo/evaluate.py measures what was learnt.
"""

import argparse
import logging
import os
import time
from pathlib import Path

import torch

from tools.demo import check, checkpoint, language, tower, world as world

log = logging.getLogger("train")

SEED = 1
TOWER_STEPS, LANGUAGE_STEPS = 3600, 2000
DEMO = Path(__file__).resolve().parents[2] / "epdd" / "demo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEMO, help="folder of the model")
    parser.add_argument("--tower", type=Path, help="keep the trained tower in this file, and "
                        "start from it if it is there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)  # more threads would round differently
    started = time.monotonic()
    tokenizer = checkpoint.build_tokenizer()
    model = checkpoint.build_model(tokenizer, SEED)
    log.info("logits differ from transformers' by at most %.1e",
             check.check(model, tokenizer, checkpoint.build_processor()))
    visual = model.model.visual
    if args.tower and args.tower.exists():
        visual.load_state_dict(torch.load(args.tower))
    else:
        torch.manual_seed(SEED)
        tower.train(visual, model.config.text_config.hidden_size, TOWER_STEPS)
        if args.tower:
            torch.save(visual.state_dict(), args.tower)
    freeze(visual)
    torch.manual_seed(SEED)
    language.train(model, tokenizer, LANGUAGE_STEPS)
    checkpoint.save(model, tokenizer, args.out)
    draw_samples(args.out / "samples")
    log.info("written to %s after %.0f seconds, %.0f of CPU", os.path.relpath(args.out),
             time.monotonic() - started, time.process_time())


@torch.no_grad()
def freeze(visual: torch.nn.Module) -> None:
    """Round the weights to float16, as they are shipped, before the language model learns from them."""
    for param in visual.parameters():
        param.requires_grad_(False)
        param.copy_(param.half().float())


def draw_samples(folder: Path) -> None:
    """Pictures to try the model with; the README and the tests use them."""
    folder.mkdir(exist_ok=True)
    whole = (0.2, 0.2, 0.8, 0.8)
    for colour, shape in [("red", "circle"), ("blue", "square"), ("green", "triangle"),
                          ("yellow", "star")]:
        scene = world.draw_plain((160, 160), [world.Thing(colour, shape, whole)])
        scene.image.save(folder / f"{colour}-{shape}.png", optimize=True)
    three = [world.Thing("red", "circle", (0.04, 0.25, 0.30, 0.75)),
             world.Thing("blue", "square", (0.37, 0.25, 0.63, 0.75)),
             world.Thing("purple", "cross", (0.70, 0.25, 0.96, 0.75))]
    world.draw_plain((240, 125), three).image.save(folder / "three-shapes.png", optimize=True)


if __name__ == "__main__":
    main()
