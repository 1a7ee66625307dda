"""A PD engine in this process: requests like the daemon's, answers by request."""

from __future__ import annotations

import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from epdd import arena, families, wire
from epdd.families.vocabulary import Vocabulary
from epdd.worker.language.cpu_runner import CpuModelRunner
from epdd.worker.language.engine import Engine
from epdd.worker.language.scheduler import HEADROOM_TOKENS
from epdd.worker.vision.plain_tower import rows
from tests.models import checkpoints


ARENA_BYTES = 8 << 20


def spec(folder: str, role: str = "pd", **options: Any) -> wire.WorkerSpec:
    """A float32 worker on one thread, not bound to anything."""
    fields: dict[str, Any] = {"name": f"{role}/0", "device": "cpu", "cpus": (), "numa_node": None, "threads": 1,
                              "dtype": "float32", "arena_bytes": ARENA_BYTES, "kv_tokens": 4096}
    return wire.WorkerSpec(role=role, model=folder, **(fields | options))


@dataclass
class Prompt:
    """Token ids with expanded placeholders, and its images with the first row of each."""

    tokens: list[int]
    images: list[Image.Image] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    runs: list[tuple[wire.Run, ...]] = field(default_factory=list)


def prompt(folder: str, parts: Sequence[int | Image.Image], seed: int = 0) -> Prompt:
    """A number of random text tokens, or an image, one after another."""
    family, rng = families.load(folder), random.Random(seed)
    made = Prompt([])
    for part in parts:
        if isinstance(part, int):
            made.tokens += [rng.randrange(300) for _ in range(part)]
            continue
        for token in family.template_ids:
            if token != family.placeholder:
                made.tokens.append(token)
                continue
            expansion = family.expand(family.grid(*part.size))
            made.starts.append(len(made.tokens))
            made.runs.append(expansion.runs)
            made.tokens += expansion.ids
        made.images.append(part)
    return made


@lru_cache(maxsize=None)
def _vocabulary(folder: str) -> Vocabulary:
    return Vocabulary(Tokenizer.from_file(f"{folder}/tokenizer.json"))


class Bench:
    """Engine, arena and the answers so far."""

    def __init__(self, folder: str, headroom: int = HEADROOM_TOKENS, make: Callable[..., Any] = CpuModelRunner,
                 embedded_by: str = "", **options: Any) -> None:
        """`make`: the model runner's class.  `embedded_by`: the checkpoint whose tower makes the images' rows, if not
        this one's."""
        self.family = families.load(folder)
        self._folder = embedded_by or folder
        self._arena = arena.Mapping(arena.create(ARENA_BYTES), ARENA_BYTES)
        self._at = 0
        self.sent: list[wire.FromWorker] = []
        made = spec(folder, **options)
        self.runner = make(made, self._arena, self.sent.append)
        self.engine = Engine(made, self.runner, self.sent.append, headroom)

    def submit(self, work_id: str, prompt: Prompt, **sampling: Any) -> list[wire.Lease]:
        """Greedy unless told otherwise; the leases that the request reads."""
        spans = []
        for image, start, runs in zip_longest(prompt.images, prompt.starts, prompt.runs, fillvalue=()):
            lease, rows, grid = self._lease(image)
            spans.append(wire.Span(start, rows, grid, lease, "float32", digest(image), runs))
        chosen = wire.Sampling(**({"max_tokens": 12, "temperature": 0.0} | sampling))
        self.engine.submit(wire.Generate(work_id, tuple(spans), chosen), np.array(prompt.tokens, np.int32).tobytes())
        return [span.lease for span in spans]

    def run(self, steps_max: int = 10_000) -> dict[str, list[int]]:
        """Step until idle; the tokens of each request, its stop token included."""
        for _ in range(steps_max):
            if not self.engine.busy:
                break
            self.engine.step()
        assert not self.engine.busy
        answers: dict[str, list[int]] = defaultdict(list)
        for message in self.sent:
            if isinstance(message, wire.Tokens):
                answers[message.id] += message.ids
            elif isinstance(message, wire.Done) and message.stop_token is not None:
                answers[message.id].append(message.stop_token)
        return answers

    def text(self, tokens: Sequence[int]) -> str:
        """The tokens' text without control tokens."""
        vocabulary = _vocabulary(self._folder)
        return b"".join(vocabulary.bytes(token) for token in tokens if not vocabulary.is_special(token)).decode()

    @staticmethod
    def token(folder: str, text: str) -> int:
        """The single token of this text."""
        return next(token for token in range(1000) if _vocabulary(folder).bytes(token) == text.encode())

    @staticmethod
    def blank(folder: str, token: int) -> bool:
        """Whether a token is white space."""
        data = _vocabulary(folder).bytes(token)
        return bool(data) and not data.strip()

    def of(self, work_id: str) -> list[wire.FromWorker]:
        return [message for message in self.sent if getattr(message, "id", None) == work_id]

    def scribble(self, leases: Sequence[wire.Lease]) -> None:
        """Overwrite leases, as their next owner would."""
        for lease in leases:
            self._arena.view(lease)[:] = b"\x7f" * lease.size

    def _lease(self, image: Image.Image) -> tuple[wire.Lease, int, tuple[int, int, int]]:
        embedding, grid = embed(self._folder, image)
        lease = wire.Lease(self._at, embedding.nbytes)
        self._at += embedding.nbytes
        target = torch.frombuffer(self._arena.view(lease), dtype=torch.float32).view(embedding.shape)
        target.copy_(embedding)
        return lease, embedding.shape[1], grid


def digest(image: Image.Image) -> str:
    """A digest of the picture's content, as the daemon's."""
    return wire.content_hash(f"{image.size}".encode() + image.tobytes())


@torch.inference_mode()
def embed(folder: str, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """[planes, rows, hidden] by the undivided model's own tower."""
    inputs = checkpoints.image_inputs(folder, [image])
    model = checkpoints.whole_model(folder).model
    if families.at(folder).fast_tower:
        out = model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"], return_dict=True)
    else:
        named = inspect.signature(model.get_image_features).parameters
        out = model.get_image_features(**{name: inputs[name] for name in inputs if name in named}, return_dict=True)
    planes = [rows(out.pooler_output), *(getattr(out, "deepstack_features", None) or ())]
    return torch.stack(planes), families.load(folder).grid(*image.size)
