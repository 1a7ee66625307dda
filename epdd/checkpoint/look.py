"""Reads a model folder: what it is, what it needs, whether epdd can serve it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer

from epdd import families
from epdd.checkpoint import chat_template, headers, quantization, tokenizer
from epdd.checkpoint.chat_template import ChatTemplate
from epdd.checkpoint.headers import Tensor
from epdd.checkpoint.quantization import Quantization
from epdd.errors import ModelError
from epdd.families import ITEMSIZE, ModelInfo
from epdd.families.family import Family
from epdd.families.files import Fields
from epdd.families.tensors import EMBEDDING, HEAD

# Prefixes of tensor names if a wrapper was saved instead of the model itself.
PREFIXES = {
    "module.": "DistributedDataParallel; save what it holds (model.module.save_pretrained), or take the prefix off",
    "_orig_mod.": "torch.compile; save what it holds (model._orig_mod.save_pretrained), or take the prefix off",
    "base_model.model.": "PEFT; merge the adapter and save that (model.merge_and_unload().save_pretrained)"}


@dataclass(frozen=True)
class PromptFiles:
    """What turns a conversation into token ids."""

    tokenizer: Tokenizer
    template: ChatTemplate


@dataclass(frozen=True)
class Look:
    """Facts of a checkpoint that epdd can serve."""

    folder: str
    name: str                       # of the model in the API, unless model.name is set
    family: ModelInfo               # with its parameters counted
    dtype: str                      # of the weights, dequantised: "bfloat16", "float16" or "float32"
    prompts: PromptFiles = field(repr=False, compare=False)
    quantization: str = "none"      # how the files store the weights, in words
    files: tuple[str, ...] = ()     # names of the weight files that are loaded
    file_bytes: int = 0             # of these files
    warnings: tuple[str, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def vision_bytes(self) -> int:
        """Bytes of the vision weights in `dtype`, dequantised; CPUs that compute in float32 need twice that."""
        return self.family.parameters[0] * ITEMSIZE[self.dtype]

    @property
    def language_bytes(self) -> int:
        """Bytes of the language weights, likewise."""
        return self.family.parameters[1] * ITEMSIZE[self.dtype]


def look(folder: str) -> Look:
    """Read the whole folder.  Raises ModelError: one sentence with the file, what is wrong, and what to do."""
    root = Path(folder)
    if not (root / "config.json").is_file():
        raise ModelError(headers.no_model(root))
    config = Fields(root / "config.json")
    family = families.family(config)
    info = family.info(config)
    family.check(config)
    tensors = headers.all_tensors(root)
    files = list(dict.fromkeys(tensor.file for tensor in tensors.values()))
    quantized = quantization.read(root, config.data, tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in quantized.extra}
    _check(config, family, tensors, quantized)
    prompts = prompt_files(info)
    eos, warnings = _words(root, info, prompts)
    info = replace(info, parameters=_parameters(family, tensors), eos_ids=eos,
                   stored=info.stored or headers.dtype(tensors))
    return Look(folder=folder, name=_name(folder), family=info, dtype=info.stored, prompts=prompts,
                quantization=quantized.text, files=tuple(path.name for path in files),
                file_bytes=sum(path.stat().st_size for path in files),
                warnings=tuple(warnings), tensors=tensors)


def prompt_files(family: ModelInfo) -> PromptFiles:
    """Read from the checkpoint's folder.  Raises ModelError."""
    return PromptFiles(tokenizer.load(family), chat_template.load(Path(family.folder)))


def _name(folder: str) -> str:
    path = Path(os.path.abspath(folder))        # so that "." has a name
    return "epdd-demo" if path == families.DEMO else path.name


def _check(config: Fields, family: Family, tensors: Mapping[str, Tensor], quantized: Quantization) -> None:
    """Raises ModelError unless the tensors, without scales, are those that config.json describes."""
    wanted = family.expected(config)
    scaled = {family.canonical(name) for name in quantized.scales}
    found: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        name = family.canonical(stored)
        if name not in wanted.shapes and not family.ignored.search(name):
            raise _unknown(family.model_type, stored, tensor)
        found[name] = tensor
    for name, shape in wanted.shapes.items():
        one = found.get(name)
        if one is None:
            twin = {HEAD: EMBEDDING, EMBEDDING: HEAD}.get(name)
            if wanted.tied and twin in found:
                continue
            where = headers.SINGLE if len({tensor.file for tensor in tensors.values()}) == 1 else headers.INDEX
            raise ModelError(f"{config.path.parent / where}: lacks {name}, which config.json asks for; take both from "
                             "the same checkpoint")
        if not wanted.fits(name, one.shape):
            raise ModelError(f"{one.file}: {name} has the shape {list(one.shape)}, but config.json asks for "
                             f"{list(shape)}; take both from the same checkpoint")
        if one.dtype not in headers.DTYPES and name not in scaled:
            raise ModelError(f"{one.file}: {name} is stored as {one.dtype}, which without its scales is no weight; "
                             "take a checkpoint in bfloat16, float16 or float32")


def _unknown(kind: str, stored: str, tensor: Tensor) -> ModelError:
    for prefix, remedy in PREFIXES.items():
        if stored.startswith(prefix):
            return ModelError(f"{tensor.file}: {stored} begins with {prefix!r}, as names are saved by {remedy}")
    return ModelError(f"{tensor.file}: {stored} is no tensor of a {kind} with this config.json; take both from the "
                      "same checkpoint")


def _words(root: Path, family: ModelInfo, prompts: PromptFiles) -> tuple[tuple[int, ...], list[str]]:
    """End tokens named by the settings, the tokenizer and the template; and warnings."""
    vocabulary, template = prompts.tokenizer, prompts.template
    warnings = []
    if (root / "adapter_config.json").exists():
        warnings.append(f"{root / 'adapter_config.json'}: the adapter is not applied; merge it into the model to serve "
                        "both")
    if not template.shows_image(vocabulary.id_to_token(family.image_token_id) or ""):
        warnings.append(f"{template.path}: the chat template shows no image; requests with one will be refused")
    if template.needs_system:
        warnings.append(f"{template.path}: the chat template demands a system message; requests without one will be "
                        "refused")
    said = template.tokens.get("eos_token")
    added = sorted(vocabulary.get_added_tokens_decoder().items(), key=lambda item: -len(item[1].content))
    after = template.end_of_turn().lstrip()
    turn = next((token for token, each in added if each.special and after.startswith(each.content)), None)
    ids = [*family.eos_ids, vocabulary.token_to_id(said) if said else None, turn]
    eos = tuple(dict.fromkeys(token for token in ids if token is not None and token < family.vocab))
    if not eos:
        warnings.append(f"{root}: no end token is named (generation_config.json, config.json or tokenizer_config.json: "
                        "eos_token_id, eos_token); answers end only at max_tokens")
    return eos, warnings


def _parameters(family: Family, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Numbers in the vision tower and in the language model."""
    vision = sum(tensor.count for name, tensor in tensors.items() if family.is_vision(name))
    return vision, sum(tensor.count for tensor in tensors.values()) - vision
