"""The real prefill-decode engine, which also tells what its last step computed."""

from __future__ import annotations

import torch

from epdd.worker.emulated.rows import NOTHING, load_of
from epdd.worker.language import engine
from epdd.worker.language.batch_inputs import PromptSequence
from epdd.worker.language.scheduler import Batch


class DemoEngine(engine.Engine):
    """`load` is (prompt tokens, decoding sequences) of the last step."""

    load = NOTHING

    def step(self) -> None:
        self.load = NOTHING
        super().step()

    def _run(self, batch: Batch[PromptSequence]) -> torch.Tensor:
        self.load = load_of(batch)
        return super()._run(batch)
