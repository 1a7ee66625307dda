"""GLM-4.6V."""

from __future__ import annotations

from epdd.families.files import Fields
from epdd.families.glm_v.glm4v import Glm4V


class Glm46V(Glm4V):
    """The dense model: GLM-4.1V's parts under another name."""

    model_type = "glm46v"

    def tied(self, config: Fields, text: Fields) -> bool:
        return config.flag("tie_word_embeddings", False)

    def check(self, config: Fields) -> None:
        # transformers builds the parts by these names, and has a mixture of experts among them.
        for part, wanted in (("text_config", "glm4v_text"), ("vision_config", "glm4v_vision")):
            fields = config.part(part)
            if fields.get("model_type") not in (None, wanted):
                raise fields.wrong("model_type", f'"{wanted}"')
        super().check(config)
