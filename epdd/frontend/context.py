"""What the frontend needs of the rest of the daemon, as one object handed to the app."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from epdd.checkpoint import PromptFiles
from epdd.dispatch.pipeline import Restarted
from epdd.dispatch.request import Request
from epdd.families import ModelInfo
from epdd.frontend.http.auth import Keys
from epdd.frontend.http.connections import Connections
from epdd.ops.metrics import RequestStats
from epdd.ops.status import States
from epdd.settings.config import Config
from epdd.wire import Done, Prefilled, Tokens

AnswerEvent = tuple[int, Prefilled | Tokens | Done]   # (choice index, event); Restarted is of all choices


class Pipeline(Protocol):
    def run(self, request: Request) -> AsyncGenerator[AnswerEvent | tuple[int, Restarted], None]:
        """Encode, then prefill and decode; closing the iterator cancels the rest.

        Ends after the last choice's Done.  Raises EpddError: before the first Tokens a client still
        gets a real status.  From the first Tokens on `request.images` may be emptied, to free the files.
        Restarted comes only if `request.whole`.
        """


class Admission(Protocol):
    def check_load(self) -> None:
        """Raises what `admit` would raise now."""

    def admit(self) -> AbstractContextManager[None]:
        """Count one request in flight.  Raises Overloaded, or NoWorker while none can serve."""

    def check(self, request: Request) -> None:
        """Raises ContextLength or BadRequest if the request could never run on an idle daemon."""


@dataclass(frozen=True)
class Context:
    config: Config
    family: ModelInfo
    prompts: PromptFiles
    model_name: str
    created: int                            # unix seconds of the daemon's start
    pipeline: Pipeline
    admission: Admission
    max_model_len: Callable[[], int]          # tokens of prompt and answer a PD worker can hold now
    states: Callable[[], States]            # the same object until a state changes; cheap
    status: Callable[[], dict[str, Any]]    # the snapshot `epdctl status --json` prints
    keys: Keys                              # who may use the API; read anew at a reload
    connections: Connections                # of the API's listeners
    stats: RequestStats                     # its snapshot() is the "requests" part of status
    emulated: dict[str, Any] | None = None  # an emulated fleet's part of the model list

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name requests may use for the model, its own first."""
        return self.model_name, *self.config.model.aliases
