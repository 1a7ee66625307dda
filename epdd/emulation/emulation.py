"""An emulated fleet, as the daemon uses it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from epdd.emulated_time import SCALE_MAX, SCALE_MIN, EncoderGroup, EmulatedWorker, PrefillDecodeGroup
from epdd.emulation.profile import Profile, read
from epdd.errors import ConfigError
from epdd.families import ModelInfo
from epdd.settings.workers import EmulationSettings

# A prefill-decode worker without a model repeats this text.
TEXT = "This answer is emulated: no model has seen the question or the pictures. "


@dataclass(frozen=True)
class Emulation:
    """One emulated fleet."""

    profile: Profile
    scale: float                    # how many times faster than the profile says
    text: tuple[int, ...]           # token ids of TEXT

    def family(self, family: ModelInfo) -> ModelInfo:
        """`family` with the sizes of the profile's model; placeholder tokens, tokenizer and template stay."""
        context_max = min(group.context_max for group in self.profile.pd)
        model = self.profile.model
        if model is None:
            return replace(family, max_model_len=min(context_max, family.max_model_len))
        return replace(family, patch=model.patch, merge=model.merge, min_pixels=model.min_pixels,
                       max_pixels=model.max_pixels, hidden=model.hidden, planes=model.planes,
                       max_model_len=context_max)

    def worker(self, group: EncoderGroup | PrefillDecodeGroup) -> EmulatedWorker:
        """What the spec of a worker of this group says about its times."""
        profile = self.profile
        return EmulatedWorker(answers=profile.answers, scale=self.scale, seed=profile.seed, group=group,
                              model=profile.model, text=self.text)

    @property
    def needs_torch(self) -> bool:
        """Whether a real model computes the answers."""
        return self.profile.answers == "demo"

    def label(self) -> dict[str, Any]:
        """What status, metrics and the model list say about the emulation."""
        return {"profile": self.profile.name, "about": self.profile.about, "answers": self.profile.answers,
                "scale": self.scale}


def load(settings: EmulationSettings, tokenizer: Tokenizer) -> Emulation | None:
    """The fleet to emulate for the checkpoint with this tokenizer; None: no emulation.  Raises ConfigError."""
    if not settings.profile:
        return None
    if settings.scale and not SCALE_MIN <= settings.scale <= SCALE_MAX:
        raise ConfigError(f"emulation.scale is {settings.scale:g}; 0, or {SCALE_MIN:g} to {SCALE_MAX:g}")
    profile = read(settings.profile)
    text = tokenizer.encode(TEXT, add_special_tokens=False).ids
    return Emulation(profile, settings.scale or profile.scale, tuple(text))
