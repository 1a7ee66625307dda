"""Random damage to a checkpoint's folder; if it is served, it must answer as transformers does."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from epdd import arena, wire
from epdd.checkpoint import Look
from epdd.dispatch.request import Image
from epdd.frontend.requests.messages import Conversation, ImageRef, Message
from epdd.frontend.text.prompt import PromptMaker
from epdd.worker.language.cpu_runner import CpuModelRunner
from epdd.worker.language.engine import Engine
from epdd.worker.vision import encoder
from tests.models import checkpoints
from tests.worker.language import pd

DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.uint8, torch.float8_e4m3fn,
          torch.bool]
TOKENS = 5
EXECUTOR = ThreadPoolExecutor(1)
PICTURE = checkpoints.picture(90, 60, 3)


def mutate(folder: Path, rng: random.Random) -> str:
    """Damage the folder at random once; returns a description."""
    kinds = [_file, _file, _key, _key, _key, _tensor, _tensor]
    return rng.choice(kinds)(folder, rng)


def _file(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.iterdir()))
    how = rng.choice(["removed", "cut", "renamed", "emptied"])
    if how == "removed":
        path.unlink()
    elif how == "renamed":
        path.rename(path.with_name("other-" + path.name))
    else:
        data = path.read_bytes()
        path.write_bytes(data[:rng.randrange(1, len(data))] if how == "cut" else b"")
    return f"{path.name} {how}"


def _key(folder: Path, rng: random.Random) -> str:
    path = rng.choice([path for path in sorted(folder.glob("*.json")) if path.name != "tokenizer.json"])
    whole = json.loads(path.read_text())
    part, where = whole, path.name
    # Half of the time one level deeper, where the sizes are.
    inner = [key for key, value in whole.items() if isinstance(value, dict) and value]
    while inner and rng.random() < 0.7:
        key = rng.choice(inner)
        part, where = part[key], f"{where} {key}"
        inner = [key for key, value in part.items() if isinstance(value, dict) and value]
    key = rng.choice(sorted(part))
    how = rng.choice(["dropped", "null", "text"])
    if how == "dropped":
        del part[key]
    else:
        part[key] = None if how == "null" else "epdd"
    path.write_text(json.dumps(whole))
    return f"{where} {key} {how}"


def _tensor(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    how = rng.choice(["dtype", "dtype", "shape", "dropped", "renamed", "more"])
    if how == "dtype":
        dtype = rng.choice(DTYPES)
        tensors[name] = tensor.to(dtype)
        how = f"as {dtype}"
    elif how == "shape":
        how = rng.choice(["cut", "flat", "longer"])
        tensors[name] = (tensor[:-1] if how == "cut" else tensor.reshape(-1, 1) if how == "flat"
                         else torch.cat([tensor, tensor[:1]])).contiguous()
    elif how == "more":
        tensors[f"{name}.more"] = torch.zeros(3)
    else:
        del tensors[name]
        if how == "renamed":
            tensors[name.replace("weight", "wait").replace("bias", "buyers")] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    return f"{path.name} {name} {how}"


class Served:
    """epdd's answer from a folder that passed the check: tokens for a prompt with a picture, by both halves."""

    def __init__(self, found: Look) -> None:
        self._found, self._family = found, found.family

    def prompt(self) -> list[int]:
        """Token ids, placeholders expanded."""
        image = Image(b"", *PICTURE.size, self._grid(), self._family.rows(self._grid()), "")
        conversation = Conversation([Message("user", [ImageRef("data:", "messages"), "what is this picture"])])
        maker = PromptMaker(self._family, self._found.prompts, EXECUTOR)
        return asyncio.run(maker.make(conversation, [image], self._family.max_model_len)).tokens

    def answer(self, prompt: list[int]) -> list[int]:
        """Greedy; end tokens do not end the answer."""
        mapping = arena.Mapping(arena.create(pd.ARENA_BYTES), pd.ARENA_BYTES)
        sent: list[wire.FromWorker] = []
        grid = self._grid()
        rows = self._family.rows(grid)
        lease = wire.Lease(0, self._family.embedding_bytes(rows))
        file = io.BytesIO()
        PICTURE.save(file, "PNG")
        eyes = encoder.Encoder(pd.spec(self._found.folder, "encoder"), mapping, sent.append)
        eyes.submit(wire.Encode("a", lease, grid, rows, PICTURE.size), file.getvalue())
        while eyes.busy:
            eyes.step()
        spec = pd.spec(self._found.folder, eos_ids=self._family.eos_ids, kv_tokens=256)
        tongue = Engine(spec, CpuModelRunner(spec, mapping, sent.append), sent.append)
        span = wire.Span(prompt.index(self._family.image_token_id), rows, grid, lease, "float32", "picture")
        tongue.submit(wire.Generate("a", (span,), wire.Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)),
                      np.array(prompt, np.int32).tobytes())
        while tongue.busy:
            tongue.step()
        failed = [message for message in sent if isinstance(message, wire.Failed)]
        assert not failed, failed
        return [token for message in sent if isinstance(message, wire.Tokens) for token in message.ids]

    def _grid(self) -> tuple[int, int, int]:
        return self._family.grid(*PICTURE.size)


class Truth:
    """transformers' answer from the same folder, or from the undamaged one if it cannot read a part of this."""

    def __init__(self, folder: Path, whole: Path) -> None:
        self._folder, self._whole = folder, whole

    def prompt(self) -> list[int]:
        ids = self._read(self._ids)
        config = self._read(AutoConfig.from_pretrained)
        at = ids.index(config.image_token_id)
        _, grid = self._pixels()
        rows = int(grid.prod()) // config.vision_config.spatial_merge_size ** 2
        return [*ids[:at], *[config.image_token_id] * rows, *ids[at + 1:]]

    @staticmethod
    def _ids(folder: str) -> list[int]:
        content = [{"type": "image"}, {"type": "text", "text": "what is this picture"}]
        ids: list[int] = AutoTokenizer.from_pretrained(folder).apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=False)
        return ids

    def eos(self) -> set[int]:
        if not (self._folder / "generation_config.json").is_file():
            return set()
        ids = self._read(GenerationConfig.from_pretrained).eos_token_id
        return set(ids if isinstance(ids, list) else [] if ids is None else [ids])

    @torch.inference_mode()
    def answer(self, prompt: list[int]) -> list[int]:
        model = AutoModelForImageTextToText.from_pretrained(self._folder, dtype=torch.float32).eval()
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        ids = torch.tensor([prompt])
        values, grid = self._pixels()
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=values,
                             image_grid_thw=grid, max_new_tokens=TOKENS,
                             mm_token_type_ids=(ids == model.config.image_token_id).int())
        return out[0, len(prompt):].tolist()

    def _pixels(self) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._read(lambda folder: Qwen2VLImageProcessorPil.from_pretrained(folder)(
            images=[PICTURE], return_tensors="pt"))
        return out["pixel_values"], out["image_grid_thw"]

    def _read(self, how: Callable[[str], Any]) -> Any:
        try:
            return how(str(self._folder))
        except Exception:   # transformers raises whatever its parts raise
            return how(str(self._whole))
