"""The local cache of the Hub: where it is, and whether a model is complete there.  Uses no network."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from epdd.checkpoint import headers
from epdd.errors import ModelError

# Files of a checkpoint that epdd reads: safetensors weights, settings, vocabulary, templates.  Subfolders hold the same
# model for other programs, and consolidated files are a second copy of the weights.
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt"]
UNWANTED = ["*/*", "consolidated*.safetensors"]


def found(model: str, revision: str) -> Path | None:
    """Folder of the model's snapshot, which has links to the blobs of the cache; None if files are missing."""
    try:
        folder = Path(snapshot_download(model, revision=revision or None, local_files_only=True,
                                        allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except LocalEntryNotFoundError:
        return None
    # Snapshots of older releases, and of programs that loaded only a tokenizer, do not list what belongs to them.
    try:
        headers.weight_files(folder)
    except ModelError:
        return None
    return folder if (folder / "config.json").exists() else None


def absent(model: str, revision: str) -> str:
    """Beginning of a message about a model that is missing or incomplete in the cache."""
    at = f" at revision {revision}" if revision else ""
    part = " only in part" if _folder(model).exists() else " not"
    return f"{model}{at} is{part} in the local cache ({constants.HF_HUB_CACHE})"


def pull_command(model: str, revision: str) -> str:
    """The command that downloads the model."""
    return f"epdd pull {model}" + (f" --revision {revision}" if revision else "")


def blobs(model: str) -> Path:
    """Folder of the blobs: contents of files, named by their hashes."""
    return _folder(model) / "blobs"


def _folder(model: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / ("models--" + model.replace("/", constants.REPO_ID_SEPARATOR))
