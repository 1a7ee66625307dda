"""How the image processor of a checkpoint cuts an image into patches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epdd.errors import ModelError
from epdd.families.files import Fields

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3         # as Pillow and transformers number it
# A missing field has a default.  transformers takes null as false, or fails at the first image.
NEVER_NULL = ("do_resize", "do_rescale", "do_normalize", "resample", "rescale_factor", "image_mean", "image_std",
              "patch_size", "merge_size", "temporal_patch_size")


@dataclass(frozen=True)
class ProcessorRule:
    """One image processor of transformers that cuts images into patches: its names, and limits where files have none.

    `size_only`: limits are read under `size` alone, by the names shortest_edge and longest_edge.
    """

    kinds: tuple[str, ...]
    min_pixels: int
    max_pixels: int
    size_only: bool = False
    temporal: int | None = None         # frames of a patch, whatever config.json says; None: as the file says


QWEN = ProcessorRule(("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil",
                      "Qwen2_5_VLImageProcessor"), min_pixels=56 * 56, max_pixels=28 * 28 * 1280)


@dataclass(frozen=True)
class Processor:
    """Sides in pixels (patch) and patches (merge), limits in pixels; mean and deviation of pixel values from 0 to 1."""

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load(root: Path, vision: Fields, rule: ProcessorRule) -> Processor:
    """Read processor_config.json as transformers 5 writes it, else preprocessor_config.json.

    Missing fields have transformers' defaults.  Raises ModelError, also if the file does not fit `vision`, the
    vision_config of config.json.
    """
    fields = _fields(root)
    kind = fields.get("image_processor_type")
    if kind is not None and kind not in rule.kinds:
        raise ModelError(f"{fields.path}: image_processor_type {kind!r} is not served; this model's are "
                         f"{', '.join(rule.kinds)}")
    for key in NEVER_NULL:
        if fields.has(key) and fields.get(key) is None:
            raise fields.wrong(key, "a value")
    if not fields.flag("do_resize", True):
        raise ModelError(f"{fields.path}: do_resize is false, which is not served: images come in all sizes; "
                         "set it to true, or remove it")
    if (resample := fields.whole("resample", BICUBIC)) != BICUBIC:
        raise ModelError(f"{fields.path}: resample is {resample}; only {BICUBIC} (bicubic) is served, which the "
                         "families use: take the file of the original checkpoint")
    low, high = _pixel_limits(fields, rule)
    mean, std = _scale(fields)
    return Processor(patch=_same(fields, "patch_size", 14, vision, "patch_size"),
                     merge=_same(fields, "merge_size", 2, vision, "spatial_merge_size"),
                     temporal=_temporal(fields, vision, rule),
                     min_pixels=low, max_pixels=high, mean=mean, std=std)


def _fields(root: Path) -> Fields:
    path = root / "processor_config.json"
    if path.is_file() and (whole := Fields(path)).get("image_processor") is not None:
        return whole.part("image_processor")
    return Fields(root / "preprocessor_config.json")


def _pixel_limits(fields: Fields, rule: ProcessorRule) -> tuple[int, int]:
    """Least and most pixels, in any of three spellings, with the defaults of transformers' processor class."""
    size = fields.part("size") if fields.get("size") is not None else None
    found = []
    for key, edge, absent in (("min_pixels", "shortest_edge", rule.min_pixels),
                              ("max_pixels", "longest_edge", rule.max_pixels)):
        if rule.size_only:
            found.append(absent if size is None else size.whole(edge, least=1))
        elif fields.get(key) is not None:
            found.append(fields.whole(key, least=1))
        elif size is None:
            found.append(absent)
        else:
            found.append(size.whole(edge if size.get(key) is None or size.get(edge) is not None else key, least=1))
    if found[0] > found[1]:
        raise ModelError(f"{fields.path}: size asks for at least {found[0]} and at most {found[1]} pixels; correct it")
    return found[0], found[1]


def _temporal(fields: Fields, vision: Fields, rule: ProcessorRule) -> int:
    if rule.temporal is None:
        return _same(fields, "temporal_patch_size", 2, vision, "temporal_patch_size")
    if fields.whole("temporal_patch_size", rule.temporal) != rule.temporal:
        raise fields.wrong("temporal_patch_size", str(rule.temporal))
    return rule.temporal


def _scale(fields: Fields) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """do_rescale and do_normalize combined into one mean and deviation, for pixel values from 0 to 1."""
    factor = fields.number("rescale_factor", 1 / 255) if fields.flag("do_rescale", True) else 1.0
    if factor == 0:
        raise fields.wrong("rescale_factor", "a number over 0")
    normalize = fields.flag("do_normalize", True)
    mean = _channels(fields, "image_mean", CLIP_MEAN) if normalize else (0.0,) * 3
    std = _channels(fields, "image_std", CLIP_STD) if normalize else (1.0,) * 3
    if min(std) <= 0:
        raise fields.wrong("image_std", "numbers over 0")
    # (x * 255 * factor - mean) / std, with numerator and denominator divided by 255 * factor.  Usually that is 1, and
    # then nothing is rounded.
    by = 1.0 if abs(factor * 255 - 1) < 1e-9 else factor * 255
    return tuple(value / by for value in mean), tuple(value / by for value in std)


def _channels(fields: Fields, key: str, absent: tuple[float, ...]) -> tuple[float, ...]:
    value = fields.get(key)
    if value is None:
        return absent
    values = value if isinstance(value, list) else [value] * 3
    if len(values) != 3 or any(isinstance(item, bool) or not isinstance(item, (int, float)) for item in values):
        raise fields.wrong(key, "three numbers")
    return tuple(float(item) for item in values)


def _same(fields: Fields, key: str, absent: int, vision: Fields, name: str) -> int:
    """A size that must be the same in the vision tower, or the tower would read patches as noise."""
    mine, towers = fields.get(key), vision.get(name)
    sides = [value[0] if isinstance(value, list) and len(set(map(str, value))) == 1 else value
             for value in (mine, towers)]
    side = absent if sides[0] is None else sides[0]
    if isinstance(side, bool) or not isinstance(side, int) or side < 1:
        raise fields.wrong(key, "a whole number of at least 1")
    if sides[1] is not None and sides[1] != side:
        have = f"is {side}" if mine is not None else f"is missing, which means {side}"
        raise ModelError(f"{fields.path}: {key} {have}, but {name} is {towers} in config.json's vision_config; "
                         "take both files from the same checkpoint")
    return side
