"""How the weights of a checkpoint are quantised: which scale belongs to which matrix, or why epdd cannot serve them.

epdd serves FP8 (E4M3) with scales, as Qwen publishes it (quant_method fp8) and as llm-compressor writes it
(quant_method compressed-tensors, format float-quantized).  The header of the file says whether a tensor is quantised,
not lists of names: each FP8 matrix has one scale tensor, and every other tensor is an ordinary weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epdd.checkpoint.headers import Tensor
from epdd.errors import ModelError
from epdd.families.files import read_json

FP8 = "F8_E4M3"
SCALE_TYPES = ("F32", "BF16", "F16")
FLOAT_TYPES = (*SCALE_TYPES, "F64")
OTHERS = "take the unquantised checkpoint, or an FP8 one (quant_method fp8 or compressed-tensors)"

# The last part of a tensor's name.
SCALES = ("weight_scale_inv", "weight_scale")       # weights are multiplied by both kinds, in spite of the name `inv`
# Scales of activations and of the KV cache: needed only to compute in FP8, which epdd does not do.
UNUSED = ("input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale")
# Tensors of other methods: with them the stored weights mean something else.
OTHER_METHODS = {
    "qweight": "AWQ or GPTQ", "qzeros": "AWQ or GPTQ", "g_idx": "GPTQ", "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes", "nested_absmax": "bitsandbytes", "SCB": "bitsandbytes", "scales": "grouped integers",
    "weight_packed": "packed integers", "weight_zero_point": "a zero point", "weight_g_idx": "reordered groups",
    "weight_shape": "packed integers", "weight_global_scale": "NVFP4", "weight_scale_2": "NVFP4",
    "pre_quant_scale": "ModelOpt AWQ", "weight_scale_inv_2": "NVFP4",
}
PRESETS = {"FP8": "tensor", "FP8_DYNAMIC": "channel", "FP8_BLOCK": "block", "UNQUANTIZED": ""}
BLOCK = (128, 128)      # if the settings name no size


@dataclass(frozen=True)
class Scale:
    """The scale tensor of one matrix [R, C]: each element is for a block of `rows` x `columns` of the matrix.

    Blocks at the lower and right edges are smaller if the sides are not multiples.
    """

    name: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Quantization:
    """How to get the weights from the tensors of a checkpoint."""

    text: str = "none"                              # in words
    scales: Mapping[str, Scale] = field(default_factory=dict)       # name of an FP8 matrix -> its scale
    extra: frozenset[str] = frozenset()             # tensors that are not weights: scales, and unused ones

    def __bool__(self) -> bool:
        return bool(self.scales)


@dataclass(frozen=True)
class _Layout:
    """How the configuration lays out scales: one a "tensor", one a "channel", or blocks (0: the whole side)."""

    strategy: str
    block: tuple[int, int] = (0, 0)

    def scale(self, shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Rows and columns of a block if a scale tensor of this shape fits this layout."""
        rows, columns = shape
        if self.strategy == "tensor":
            return (rows, columns) if scale_shape in ((), (1,), (1, 1)) else None
        if self.strategy == "channel":
            return (1, columns) if scale_shape in ((rows,), (rows, 1)) else None
        block = self.block[0] or rows, self.block[1] or columns
        found = -(-rows // block[0]), -(-columns // block[1])
        return (min(block[0], rows), min(block[1], columns)) if scale_shape == found else None

    def __str__(self) -> str:
        if self.strategy == "group":
            return f"groups of {self.block[1]}"
        return "blocks of {} x {}".format(*self.block) if self.strategy == "block" else f"one scale a {self.strategy}"


def read(root: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Quantization:
    """The quantisation that `config` (the content of config.json) and the headers of the tensors describe.

    Raises ModelError if epdd does not serve the method, or if scales and matrices do not fit together.
    """
    key, found = _settings(root, config)
    if found is None:
        _refuse_unexplained(root, tensors)
        return Quantization()
    where = f"{root / 'config.json'}: {key}"
    method, layouts = _layouts(where, config, found)
    for name, tensor in tensors.items():
        other = OTHER_METHODS.get(name.rpartition(".")[2])
        if other:
            raise ModelError(f"{tensor.file}: {name} is of another kind of quantisation ({other}) than quant_method "
                             f"{method}, and is not served; {OTHERS}")
    scales = _scales(where, layouts, tensors)
    extra = {name for name in tensors if name.rpartition(".")[2] in (*SCALES, *UNUSED)}
    if not scales:
        return Quantization(extra=frozenset(extra))
    text = f"FP8 ({method}: {', '.join(sorted({str(layout) for layout in layouts}))})"
    return Quantization(text, scales, frozenset(extra))


def check_settings(root: Path, config: Mapping[str, Any]) -> None:
    """Check the settings alone, without weights.  Raises ModelError if epdd does not serve the method they name."""
    key, found = _settings(root, config)
    if found is not None:
        _layouts(f"{root / 'config.json'}: {key}", config, found)
    elif told := _modelopt(root):
        raise ModelError(told)


def _settings(root: Path, config: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Name and content of the quantisation settings; None if there are none."""
    path = root / "config.json"
    for part in ("", "text_config", "vision_config"):
        values = config.get(part) if part else config
        for key in ("quantization_config", "compression_config"):
            found = values.get(key) if isinstance(values, Mapping) else None
            name = f"{part}.{key}" if part else key
            if found and not isinstance(found, dict):
                raise ModelError(f"{path}: {name} is not a JSON object; download the file again")
            if found:
                return name, found
    if config.get("quantization"):
        raise ModelError(f"{path}: quantised for MLX (its field quantization), which is not served; {OTHERS}")
    return "", None


def _modelopt(root: Path) -> str:
    """Error message if ModelOpt's file says that it quantised the weights; the file may exist without that."""
    path = root / "hf_quant_config.json"
    said = read_json(path, {}).get("quantization")
    kind = said.get("quant_algo") if isinstance(said, dict) else None
    return f"{path}: quantised by ModelOpt ({kind}), which is not served; {OTHERS}" if kind else ""


def _layouts(where: str, config: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[str, list[_Layout]]:
    """The method, and the layouts that its scales may have."""
    method = str(settings.get("quant_method") or "").replace("_", "-")
    if method == "fp8":
        return method, _fp8_layouts(where, settings)
    if method == "compressed-tensors":
        return method, _compressed_layouts(where, settings)
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        method = "bitsandbytes"
    if not method:
        said = "MLX's settings, which are" if config.get("quantization") else "no quant_method, and is"
        raise ModelError(f"{where} has {said} not served; {OTHERS}")
    kind = settings.get("quant_algo")
    raise ModelError(f"{where}.quant_method {method!r}{f' ({kind})' if kind else ''} is not served; {OTHERS}")


def _fp8_layouts(where: str, settings: Mapping[str, Any]) -> list[_Layout]:
    form = settings.get("fmt")
    if form not in (None, "e4m3", "float8_e4m3fn"):
        raise ModelError(f"{where}.fmt {form!r} is not served, only e4m3; {OTHERS}")
    block = settings.get("weight_block_size")
    if block is not None:
        return [_Layout("block", _sides(f"{where}.weight_block_size", block))]
    whole = [_Layout("tensor"), _Layout("channel")]
    return whole if "weight_block_size" in settings else [*whole, _Layout("block", BLOCK)]


def _compressed_layouts(where: str, settings: Mapping[str, Any]) -> list[_Layout]:
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise ModelError(f"{where}.sparsity_config.format {sparsity['format']!r} is not served; {OTHERS}")
    transforms = settings.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise ModelError(f"{where}.transform_config (rotated weights) is not served; {OTHERS}")
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, dict):
        raise ModelError(f"{where}.config_groups is not a JSON object; download the file again")
    layouts = []
    for name, group in groups.items():
        at = f"{where}.config_groups.{name}"
        if isinstance(group, list):     # name of a preset, and its modules
            if name not in PRESETS:
                raise ModelError(f"{at}: this scheme is not served; {OTHERS}")
            layouts += [_Layout(PRESETS[name], BLOCK if name == "FP8_BLOCK" else (0, 0))] if PRESETS[name] else []
            continue
        if not isinstance(group, dict):
            raise ModelError(f"{at} is not a JSON object; download the file again")
        if group.get("weights"):        # other groups are for activations, keys and values
            layouts.append(_group_layout(at, group, settings.get("format")))
    return layouts


def _group_layout(at: str, group: Mapping[str, Any], form: object) -> _Layout:
    weights, own = group["weights"], group.get("format")
    form = own or (None if form == "mixed-precision" else form)
    if form not in (None, "float-quantized", "naive-quantized"):
        raise ModelError(f"{at}: format {form!r} is not served, only float-quantized; {OTHERS}")
    kind = (weights.get("type"), weights.get("num_bits")) if isinstance(weights, dict) else None
    if kind != ("float", 8):
        raise ModelError(f"{at}.weights: {_bits(weights)} is not served, only FP8; {OTHERS}")
    for key, served in (("symmetric", (True, None)), ("actorder", (None, False))):
        if weights.get(key) not in served:
            raise ModelError(f"{at}.weights.{key} {weights[key]!r} is not served; {OTHERS}")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy in ("tensor", "channel"):
        return _Layout(strategy)
    if strategy == "block":
        return _Layout("block", _sides(f"{at}.weights.block_structure", weights.get("block_structure")))
    if strategy == "group":
        return _Layout("group", (1, _sides(f"{at}.weights.group_size", [1, weights.get("group_size")])[1]))
    raise ModelError(f"{at}.weights.strategy {strategy!r} is not served; {OTHERS}")


def _bits(weights: object) -> str:
    return f"{weights.get('type')} of {weights.get('num_bits')} bits" if isinstance(weights, dict) else repr(weights)


def _sides(where: str, value: object) -> tuple[int, int]:
    if isinstance(value, str) and value.count("x") == 1 and value.replace("x", "").isdigit():
        value = [int(side) for side in value.split("x")]        # older spelling: "128x128"
    if not (isinstance(value, list) and len(value) == 2 and all(type(side) is int and side > 0 for side in value)):
        raise ModelError(f"{where} is {value!r}, not two sizes in numbers; download the file again")
    return value[0], value[1]


def _scales(where: str, layouts: Iterable[_Layout], tensors: Mapping[str, Tensor]) -> dict[str, Scale]:
    """Name of each FP8 matrix -> its scale.  Raises ModelError if one is missing or they do not fit together."""
    found: dict[str, Scale] = {}
    for name, tensor in tensors.items():
        kind = name.rpartition(".")[2]
        if kind in SCALES:
            matrix = tensors.get(name[:-len(kind)] + "weight")
            if matrix is None or matrix.dtype != FP8:
                raise ModelError(f"{tensor.file}: {name} is the scale of a matrix that is "
                                 f"{'missing' if matrix is None else f'stored as {matrix.dtype}, not in FP8'}; "
                                 "download the checkpoint again, or take the unquantised one")
        elif tensor.dtype == FP8:
            found[name] = _scale(where, layouts, name, tensors)
        elif tensor.dtype not in FLOAT_TYPES and kind == "weight":
            raise _not_floats(name, tensor)
    return found


def _scale(where: str, layouts: Iterable[_Layout], name: str, tensors: Mapping[str, Tensor]) -> Scale:
    tensor = tensors[name]
    base = name.rpartition(".")[0]
    names = [f"{base}.{kind}" for kind in SCALES if name == f"{base}.weight" and f"{base}.{kind}" in tensors]
    if len(names) != 1 or len(tensor.shape) != 2:
        wrong = (f"has the shape {list(tensor.shape)}, and only matrices are served in FP8" if names
                 else "is FP8 without a scale (weight_scale or weight_scale_inv)")
        raise ModelError(f"{tensor.file}: {name} {'has two scales' if len(names) == 2 else wrong}; "
                         "download the checkpoint again, or take the unquantised one")
    scale = tensors[names[0]]
    if scale.dtype not in SCALE_TYPES:
        raise ModelError(f"{scale.file}: {names[0]} is stored as {scale.dtype}, and scales are served as "
                         f"{', '.join(SCALE_TYPES)}; {OTHERS}")
    # A checkpoint may have several groups: the shape of the scale tells which one this is.
    blocks = {block for layout in layouts if (block := layout.scale(tensor.shape, scale.shape))}
    if len(blocks) != 1:
        meant = " or ".join(sorted({str(layout) for layout in layouts})) or "no scales at all"
        raise ModelError(f"{scale.file}: {names[0]} has the shape {list(scale.shape)}, which for a matrix of "
                         f"{list(tensor.shape)} is not what {where} says ({meant}); download the checkpoint again")
    return Scale(names[0], *blocks.pop())


def _refuse_unexplained(root: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises ModelError if there are quantised tensors but no settings that explain them."""
    for name, tensor in tensors.items():
        kind = name.rpartition(".")[2]
        if kind in SCALES or kind in OTHER_METHODS or tensor.dtype == FP8:
            raise ModelError(_modelopt(root) or f"{tensor.file}: {name} is of a quantised checkpoint, but "
                             f"{root / 'config.json'} has no quantization_config that says how; put the field back, "
                             f"or {OTHERS}")
        if tensor.dtype not in FLOAT_TYPES and kind == "weight":
            raise _not_floats(name, tensor)


def _not_floats(name: str, tensor: Tensor) -> ModelError:
    return ModelError(f"{tensor.file}: {name} is stored as {tensor.dtype}, which is not served; {OTHERS}")
