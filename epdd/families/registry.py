"""The families that epdd serves, by model_type."""

from __future__ import annotations

from pathlib import Path

from epdd.errors import ModelError
from epdd.families.family import Family
from epdd.families.files import Fields
from epdd.families.glm_v.glm4v import Glm4V
from epdd.families.glm_v.glm46v import Glm46V
from epdd.families.glm_v.glm_ocr import GlmOcr
from epdd.families.model_info import ModelInfo
from epdd.families.paddleocr_vl import PaddleOcrVL
from epdd.families.qwen_vl.qwen2_5_vl import Qwen2_5VL
from epdd.families.qwen_vl.qwen2_vl import Qwen2VL
from epdd.families.qwen_vl.qwen3_vl import Qwen3VL
from epdd.families.qwen_vl.qwen3_vl_moe import Qwen3VLMoe

FAMILIES: dict[str, Family] = {family.model_type: family for family in (
    Qwen2VL(), Qwen2_5VL(), Qwen3VL(), Qwen3VLMoe(), Glm4V(), Glm46V(), GlmOcr(), PaddleOcrVL())}


def family(config: Fields) -> Family:
    """The family of a config.json.  Raises ModelError if it is not served."""
    kind = config.get("model_type")
    found = FAMILIES.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise ModelError(f"{config.path}: model_type {kind!r} is not served; epdd serves {', '.join(FAMILIES)}")
    return found


def at(folder: str | Path) -> Family:
    """The family of a model folder.  Raises ModelError."""
    return family(Fields(Path(folder) / "config.json"))


def of(config: Fields) -> ModelInfo:
    """Facts of the checkpoint with this config.json.  Raises ModelError naming the file and the field that is wrong or
    not served."""
    return family(config).info(config)


def load(folder: str) -> ModelInfo:
    """The same from the folder."""
    return of(Fields(Path(folder) / "config.json"))
