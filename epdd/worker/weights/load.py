"""Loads one half of a checkpoint: the vision tower or the language model.

Uses transformers' own from_pretrained (for renamed keys, tied weights and shards) with
a subclass that drops the other half while the model is still on the meta device, so that only the wanted
half is ever read.  Weights whose type is kept stay file pages, shared by all workers that map them.
"""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import CONFIG_MAPPING, logging as transformers_logging
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from epdd import families
from epdd.checkpoint import headers, quantization
from epdd.errors import ModelError
from epdd.families.family import Family
from epdd.families.files import read_json
from epdd.families.model_info import AUTO
from epdd.worker.kernels import cuda
from epdd.worker.weights import dequantize

log = logging.getLogger(__name__)


class Dropped(nn.Module):  # type: ignore[misc]
    """Replaces the half that this process does not need."""


def load_vision(folder: str, dtype: str, device: str) -> Any:
    """The vision tower in eval mode, if it is a module of its own.  Raises ModelError."""
    return load_vision_half(folder, dtype, device).visual


def load_vision_half(folder: str, dtype: str, device: str) -> Any:
    """transformers' base model without its language model, in eval mode.  Raises ModelError."""
    return _load_half(folder, "vision", pick_dtype(folder, dtype, device), device, "sdpa").base_model


def load_language(folder: str, dtype: str, device: str, attention: str) -> Any:
    """The whole model class without its vision tower, in eval mode.  Raises ModelError.

    `attention` is a name known to transformers' AttentionInterface.
    """
    model = _load_half(folder, "language", pick_dtype(folder, dtype, device), device, attention)
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ("full_attention",))
    if kinds != {"full_attention"}:
        raise ModelError(f"{folder}: attention of kind {', '.join(sorted(kinds))} is not served")
    return model


def pick_dtype(folder: str, wanted: str, device: str) -> torch.dtype:
    """What to compute in.  "auto" keeps the checkpoint's type where the device computes it well.

    On CPUs with bfloat16 instructions a product takes a half of float32's time or less, without them three
    times as long; float16 is computed by none of them.
    """
    if wanted == "float16" and device == "cpu":
        return torch.float32
    if wanted != "auto":
        return cast(torch.dtype, getattr(torch, wanted))
    config = _config(folder)
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or getattr(
        torch, headers.dtype(headers.all_tensors(Path(folder))))
    if device != "cpu":
        return torch.float32 if stored == torch.float32 else torch.bfloat16
    return torch.bfloat16 if stored == torch.bfloat16 and _cpu_has_fast_bfloat16() else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32: how wire.py spells it."""
    return str(dtype).removeprefix("torch.")


def _cpu_has_fast_bfloat16() -> bool:
    with open("/proc/cpuinfo") as file:
        flags = next((line for line in file if line.startswith("flags")), "")
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(flags.split()) and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported())


def abilities(device: str) -> tuple[str, ...]:
    """The instructions that torch uses on `device`; /proc/cpuinfo only has those of the CPU."""
    if device != "cpu":
        return (cuda.card(device),)
    # Two of these have private names: if one is gone, its ability is not reported.
    asked = (("bfloat16", getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)),
             ("AMX", getattr(torch.cpu, "_is_amx_tile_supported", None)))
    return (str(torch.backends.cpu.get_cpu_capability()), *(name for name, has in asked if has is not None and has()))


def _config(folder: str) -> Any:
    data = read_json(Path(folder) / "config.json")      # also with a byte order mark, which transformers does not read
    for part in (data, data.get("text_config"), data.get("vision_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part, dict) and part.get(key) == AUTO:
                del part[key]       # transformers looks for a type of this name
    try:
        return CONFIG_MAPPING[data["model_type"]].from_dict(data)
    except Exception as error:      # transformers checks fields with exceptions of many kinds
        raise ModelError(f"{folder}/config.json: cannot be used ({type(error).__name__}: {error})") from error


def _load_half(folder: str, half: str, dtype: torch.dtype, device: str, attention: str) -> Any:
    transformers_logging.disable_progress_bar()
    config = _config(folder)
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if whole is None:
        raise ModelError(f"{folder}: model_type {config.model_type!r} is not a vision-language model")
    _forget_quantization(config)
    root, family = Path(folder), families.at(folder)
    try:
        tensors = headers.all_tensors(root)
        quantized = quantization.read(root, read_json(root / "config.json"), tensors)
        # A state dict only where there is something to compute: transformers itself reads shard by shard.
        made = dequantize.weights(
            tensors, quantized, dtype, lambda name: family.is_vision(name) == (half == "vision")) if quantized else \
            nullcontext(None)
        with made as state:
            model, found = _half_class(whole, half, family).from_pretrained(
                folder if state is None else None, config=config, dtype=dtype, attn_implementation=attention,
                state_dict=state, local_files_only=True, output_loading_info=True, use_safetensors=True)
    except ModelError:
        raise
    except Exception as error:      # a folder that got past the look, and that transformers cannot use all the same
        raise ModelError(f"{folder}: weights cannot be loaded ({type(error).__name__}: {error})") from error
    if found["missing_keys"] or found["mismatched_keys"]:
        names = sorted(found["missing_keys"]) or sorted(str(key[0]) for key in found["mismatched_keys"])
        raise ModelError(f"{folder}: {len(names)} weights are missing or of the wrong shape, first {names[0]}")
    if found["unexpected_keys"]:
        names = sorted(found["unexpected_keys"])
        raise ModelError(f"{folder}: {len(names)} tensors are not known to a {config.model_type}, first {names[0]}; "
                         "the answers could be wrong without them")
    return model.to(device).eval().requires_grad_(False)


def _forget_quantization(config: Any) -> None:
    """What transformers would do with it needs other packages, and is done by `dequantize`."""
    for part in (config, config.get_text_config(), getattr(config, "vision_config", None)):
        if hasattr(part, "quantization_config"):
            delattr(part, "quantization_config")


@functools.cache
def _half_class(whole: type, half: str, family: Family) -> Any:
    """A subclass of a model class whose instances lack the other half from the start."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)  # type: ignore[misc]
        if half == "language":
            for name in family.vision_modules:
                setattr(self.model, name, Dropped())
            return
        for name in family.language_modules:
            setattr(self.model, name, Dropped())
        self.lm_head = Dropped()
        self.all_tied_weights_keys = {}

    others = family.of_vision if half == "language" else f"^(?!.*{family.of_vision})"
    members: dict[str, Any] = {"__init__": __init__, "__module__": whole.__module__,
                               "_keys_to_ignore_on_load_unexpected": [others, family.ignored.pattern]}
    if half == "vision":
        # transformers asks for these to size and tie embeddings, which this half has not.
        members |= {"get_input_embeddings": lambda self: None, "get_output_embeddings": lambda self: None,
                    "_tied_weights_keys": None}
    # The class keeps its name: transformers looks up key renamings by it.
    return type(whole.__name__, (whole,), members)
