"""Two hundred damaged checkpoints: each is served with transformers' tokens, or refused by the check."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from epdd import checkpoint as looks
from epdd.errors import ModelError
from tests.checkpoint.mutations import Served, Truth, mutate

COUNT = 200
LOOK_S = 2.0        # seconds of CPU time, which other load does not change
NAMES = ("config.json", "safetensors", "tokenizer.json", "chat_template.jinja", "chat_template.json")


def newest(whole: Path, folder: Path) -> Path:
    """A copy with the single processor file of transformers 5."""
    shutil.copytree(whole, folder)
    image = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    image |= {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3,
              "rescale_factor": 1 / 255, "data_format": "channels_first"}
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor",
                                                              "image_processor": image}))
    return folder


def check(folder: Path, whole: Path) -> str:
    """"refused" or "served"."""
    began = time.process_time()
    try:
        found = looks.look(str(folder))
    except ModelError as error:
        assert time.process_time() - began < LOOK_S
        assert str(folder) in error.message and any(name in error.message for name in NAMES), error.message
        assert "\n" not in error.message
        return "refused"
    served, truth = Served(found), Truth(folder, whole)
    prompt = served.prompt()
    assert prompt == truth.prompt()
    assert truth.eos() <= set(found.family.eos_ids)
    assert served.answer(prompt) == truth.answer(prompt)
    return "served"


@pytest.mark.slow
def test_each_is_served_rightly_or_refused_by_name(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    wholes = [Path(checkpoint(*asked, **options)) for asked, options in (
        (("qwen2_vl",), {}), (("qwen2_5_vl",), {}), (("qwen3_vl",), {}), (("qwen3_vl",), {"shards": 3}),
        (("qwen2_5_vl",), {"tie": True}))]
    wholes.append(newest(wholes[2], tmp_path / "newest"))
    ends: Counter[str] = Counter()
    for seed in range(COUNT):
        rng = random.Random(seed)
        whole, folder = rng.choice(wholes), tmp_path / str(seed)
        shutil.copytree(whole, folder)
        what = mutate(folder, rng)
        try:
            ends[check(folder, whole)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {what}: {error}") from error
        shutil.rmtree(folder)
    assert min(ends["served"], ends["refused"]) > COUNT // 5, ends      # else the test proves little
