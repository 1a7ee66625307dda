"""The Hub's local cache: where it is, and whether all of a model is there.  Asks no network."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from epdd.checkpoint import headers
from epdd.errors import ModelError

# What epdd reads of a checkpoint: weights as safetensors, settings, vocabulary, templates.  Subfolders hold other
# programs' forms of the same model, consolidated files a second copy of the weights.
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt"]
UNWANTED = ["*/*", "consolidated*.safetensors"]


def found(model: str, revision: str) -> Path | None:
    """Folder of the model's snapshot if all of it is there: links into the cache's blobs."""
    try:
        folder = Path(snapshot_download(model, revision=revision or None, local_files_only=True,
                                        allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except LocalEntryNotFoundError:
        return None
    # Snapshots of older releases, and of programs that wanted only a tokenizer, carry no list of what belongs to them.
    try:
        headers.weight_files(folder)
    except ModelError:
        return None
    return folder if (folder / "config.json").exists() else None


def absent(model: str, revision: str) -> str:
    """The beginning of each sentence about a model that is not there, or not whole."""
    at = f" at revision {revision}" if revision else ""
    part = " only in part" if _folder(model).exists() else " not"
    return f"{model}{at} is{part} in the local cache ({constants.HF_HUB_CACHE})"


def pull_command(model: str, revision: str) -> str:
    """What a person types to download it."""
    return f"epdd pull {model}" + (f" --revision {revision}" if revision else "")


def blobs(model: str) -> Path:
    """Folder of the files' contents, each named by its hash."""
    return _folder(model) / "blobs"


def _folder(model: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / ("models--" + model.replace("/", constants.REPO_ID_SEPARATOR))
