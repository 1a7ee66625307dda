"""Models named by id, ORG/NAME: found in the local cache of the Hugging Face Hub, or downloaded into it.

huggingface_hub is imported only for a model named by id, so a daemon that serves a folder saves its memory and start
time.
"""

from __future__ import annotations

import re
from pathlib import Path

from msgspec.structs import replace

from epdd.errors import ModelError
from epdd.settings.config import Config

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ADDRESS = re.compile(rf"(?:https?://[^/]+/|hf://(?:models/)?)({_ID.pattern})(?:[/@?#].*)?")


def is_id(model: str) -> bool:
    """Whether `model` is an id, ORG/NAME.  If a folder has that name, it is the folder."""
    return bool(_ID.fullmatch(model)) and not Path(model).exists()


def located(settings: Config, download: bool) -> Config:
    """`settings` with the folder of a model named by id, and the id as model.name unless that is set.

    A model that is not named by id stays.  `download`: download it if it is not in the local cache.  Raises ModelError
    that says what to do, or HubUnreachable if only the network is missing.
    """
    model = settings.model
    if not is_id(model.path):
        refuse_missing(model.path)
        return settings
    from epdd.hub import cache
    folder = cache.found(model.path, model.revision)
    if folder is None:
        if not download:
            command = cache.pull_command(model.path, model.revision)
            raise ModelError(f"{cache.absent(model.path, model.revision)}; run `{command}`, for a service with its "
                             "HF_HOME, or set model.download = true")
        from epdd.hub import download as downloads
        folder = downloads.pull(model.path, model.revision)
    return replace(settings, model=replace(model, path=str(folder), name=model.name or model.path))


def refuse_missing(model: str) -> None:
    """Raises ModelError if `model` is neither a folder nor an id.  Empty means the demo model."""
    if not model or Path(model).exists() or is_id(model):
        return
    if address := _ADDRESS.fullmatch(model):
        raise ModelError(f"{model} is an address; name the model as {address[1]}")
    from epdd.checkpoint import headers
    raise ModelError(headers.no_model(Path(model)))
