"""The emulated prefill-decode role: continuous batching, each step for as long as the time model says.

The real engine decides which sequences are in a step (`worker/language/engine.py`), also without a model.  A step of
`prefill` prompt tokens and `decoding` sequences takes

    max(decode.a, prefill / prefill_tokens_per_s) + decode.b * decoding + decode.c * decoding^2

emulated seconds: weights are read once a step (a), or computing takes longer than that; each decoding sequence adds
the reading of its own cache.  A mixed step is one pass, so a and the prompt's computing are not added.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

from epdd import wire
from epdd.arena import Mapping
from epdd.emulated_time import Clock, PrefillDecodeGroup
from epdd.worker.emulated.delay import EmulatedTime
from epdd.worker.emulated.runner import EmulatedModelRunner
from epdd.worker.language.engine import Engine
from epdd.worker.language.model_runner import ModelRunner
from epdd.worker.process.loop import Send


class EmulatedPrefillDecode(EmulatedTime):
    """Delays what the engine answers, with the demo model on a CPU or without a model."""

    def __init__(self, spec: wire.WorkerSpec, arena: Mapping | None, send: Send,
                 wait: Callable[[float], None], clock: Clock | None = None) -> None:
        """Raises StartupError where the demo model cannot be loaded."""
        emulated = spec.emulated
        assert emulated is not None and isinstance(emulated.group, PrefillDecodeGroup)
        super().__init__(spec.name, emulated, send, wait, clock or Clock(emulated.scale))
        self._group = emulated.group
        self._answers: list[wire.FromWorker] = []
        if emulated.model is not None:
            runner: ModelRunner = EmulatedModelRunner(spec, emulated.model, emulated.text, arena)
        else:
            cpu = importlib.import_module("epdd.worker.language.cpu_runner")
            runner = cpu.CpuModelRunner(replace(spec, device="cpu"), arena, self._answers.append)
        self._engine = Engine(spec, runner, self._answers.append)
        self._arrived = 0.0         # when the last idle time ended

    def submit(self, message: wire.ToWorker, raw: bytes) -> None:
        """Queue a request; a bad one is answered at once.  Raises ProtocolError on another role's work."""
        if not self.busy:
            self._arrived = self.clock.now()
        self._engine.submit(message, raw)
        self._pass_on()

    def cancel(self, work_id: str) -> None:
        """Drop a request; the present step sends nothing more for it."""
        self._engine.cancel(work_id)
        if self._answers:       # it had not ended yet
            self._delayed = [message for message in self._delayed if getattr(message, "id", None) != work_id]
        self._pass_on()

    @property
    def busy(self) -> bool:
        return self.computing or self._engine.busy

    def heartbeat(self) -> wire.Heartbeat:
        return self._engine.heartbeat()

    def warm_up(self, progress: Callable[[float], None]) -> wire.Ready:
        """As of the engine; the emulated clock starts here."""
        ready = self._engine.warm_up(progress)
        self._answers.clear()
        self.clock.start()
        return ready

    def _begin(self) -> None:
        self._engine.step()
        prefill, decoding = self._engine.load
        if not prefill + decoding:      # all were preempted: the next step computes
            self._pass_on()
            return
        self._spend(self._arrived, self._group.step_seconds(prefill, decoding))
        self._delayed = self._answers[:]
        self._answers.clear()

    def _pass_on(self) -> None:
        for message in self._answers:
            self._send(message)
        self._answers.clear()
