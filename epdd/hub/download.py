"""Downloads a model of the Hub into the local cache, and continues an interrupted download.

huggingface_hub lists the files, downloads the small ones and makes the snapshot of links.  It keeps nothing of an
interrupted file, and a shard has gigabytes.  So weights are downloaded here, with its HTTP client, into a .part file
next to the blobs of the cache, which is renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import (build_hf_headers, disable_progress_bars,     # type: ignore[attr-defined]
                                   filter_repo_objects, logging)

from epdd import __version__
from epdd.errors import ModelError
from epdd.hub import cache, faults, names
from epdd.hub.bars import Bars, size

FILES_AT_ONCE = 8
HTTP_BYTES_MAX = 50_000_000_000     # the Hub serves larger files only by xet: huggingface_hub downloads those
PIECE_BYTES = 1 << 20       # after an interruption at most this much of each file is downloaded again
SPARE_BYTES = 64 << 20      # of the disk, kept free for others


@dataclass(frozen=True)
class _Weights:
    """A weights file in the large-file storage of the Hub."""

    name: str
    bytes: int
    sha256: str         # also the name of its blob


class _Stopped(Exception):
    """The download of another file failed."""


def pull(model: str, revision: str = "") -> Path:
    """Download all files of the model that epdd reads; returns the folder of its snapshot.

    Exits the process with 130 on Ctrl-C.  Raises ModelError, HubUnreachable.
    """
    disable_progress_bars()
    logging.set_verbosity_error()       # type: ignore[no-untyped-call]
    constants.DOWNLOAD_CHUNK_SIZE = PIECE_BYTES
    names.watch_answers()
    try:
        with faults.told(model, revision):
            return _pull(model, revision)
    except KeyboardInterrupt:
        print(f"epdd: stopped; `{cache.pull_command(model, revision)}` goes on where this left off", file=sys.stderr,
              flush=True)
        os._exit(130)       # any other exit would wait for threads that wait for the network


def _pull(model: str, revision: str) -> Path:
    info = HfApi(library_name="epdd", library_version=__version__).model_info(
        model, revision=revision or None, files_metadata=True)
    files = {file.rfilename: file for file in info.siblings or ()}
    wanted = list(filter_repo_objects(files, allow_patterns=cache.WANTED, ignore_patterns=cache.UNWANTED))
    _refuse(model, list(files), wanted)
    # Settings first: a model that epdd cannot serve is refused before its weights are downloaded.  By commit, so that
    # the branch points to the new snapshot only when it is complete.
    small = [name for name in wanted if not name.endswith(".safetensors")]
    commit = names.checked(str(info.sha), names.COMMIT, "the commit")
    folder = _snapshot(model, commit, small)
    refuse_unserved(folder)
    stored = {name: lfs for name in wanted if name.endswith(".safetensors") and (lfs := files[name].lfs)}
    _fetch(model, commit, [_Weights(name, lfs.size, names.checked(lfs.sha256, names.SHA256, f"{name}'s hash"))
                           for name, lfs in stored.items() if lfs.size <= HTTP_BYTES_MAX])
    return _snapshot(model, revision or None, cache.WANTED)


def _snapshot(model: str, revision: str | None, patterns: list[str]) -> Path:
    return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=cache.UNWANTED,
                                  library_name="epdd", library_version=__version__))


def _refuse(model: str, names: list[str], wanted: list[str]) -> None:
    """Raises ModelError if the files on the Hub are not a checkpoint that epdd can serve."""
    if not any(name.endswith(".safetensors") for name in wanted):
        others = sorted({kind for name in names for kind in (".gguf", ".bin", ".pth", ".pt") if name.endswith(kind)})
        raise ModelError(f"{model} has no weights as safetensors" + (f", only {', '.join(others)}" if others else "")
                         + ", and epdd reads no others; choose a model with *.safetensors files")
    if "config.json" not in wanted:
        raise ModelError(f"{model} has no config.json, so it is no checkpoint for transformers; choose another")


def refuse_unserved(folder: Path) -> None:
    """Raises ModelError if the settings files already show that epdd cannot serve the model."""
    from epdd import families
    from epdd.checkpoint import quantization
    from epdd.families.files import Fields
    config = Fields(folder / "config.json")
    families.of(config)
    quantization.check_settings(folder, config.data)


def _fetch(model: str, commit: str, weights: list[_Weights]) -> None:
    """Download the weights into the blobs of the cache."""
    blobs = cache.blobs(model)
    missing = [file for file in weights if not (blobs / file.sha256).exists()]
    if not missing:
        return
    blobs.mkdir(parents=True, exist_ok=True)
    here = {file: min(_bytes_of(_part(blobs, file)), file.bytes) for file in missing}
    _refuse_full_disk(model, blobs, sum(file.bytes - here[file] for file in missing))
    total = sum(file.bytes for file in weights)
    bars = Bars(model, total, total - sum(file.bytes - here[file] for file in missing))
    threads = ThreadPoolExecutor(FILES_AT_ONCE)
    with bars:
        work = [threads.submit(_one, model, commit, file, blobs, bars) for file in missing]
        try:
            for each in as_completed(work):
                each.result()
        except Exception:
            bars.stopped = True
            threads.shutdown(cancel_futures=True)
            raise
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    threads.shutdown()


def _one(model: str, commit: str, file: _Weights, blobs: Path, bars: Bars) -> None:
    """Download one file, or the rest of it.  After a failure the part that has arrived stays."""
    blob, part = blobs / file.sha256, _part(blobs, file)
    with part.open("ab", buffering=0) as target:
        fcntl.flock(target, fcntl.LOCK_EX)      # another process may download the same file
        if blob.exists():
            part.unlink(missing_ok=True)
            return
        if (here := target.tell()) > file.bytes:
            target.truncate(here := 0)
        task = bars.began(file.name, file.bytes, here)

        class Bar:
            """Stands in for the tqdm bar that http_get updates."""

            def __init__(self, **told: Any) -> None:
                pass

            def __enter__(self) -> Self:
                return self

            def __exit__(self, *how: object) -> None:
                pass

            def update(self, count: float = 1) -> None:
                bars.add(task, int(count))
                if target.tell() > file.bytes:
                    target.truncate(0)
                    raise ModelError(f"{model}: {file.name} is longer than the {file.bytes} bytes that the Hub names; "
                                     "check HF_ENDPOINT")
                if bars.stopped:
                    raise _Stopped

        http_get(hf_hub_url(model, file.name, revision=commit), target, resume_size=here,
                 headers=build_hf_headers(library_name="epdd", library_version=__version__),
                 expected_size=file.bytes, displayed_filename=file.name, tqdm_class=Bar)
        with part.open("rb") as whole:
            if hashlib.file_digest(whole, "sha256").hexdigest() != file.sha256:
                target.truncate(0)
                raise ModelError(f"{model}: {file.name} arrived damaged: its SHA-256 is not the one that the Hub "
                                 "names; run the same command again to fetch it anew")
        part.replace(blob)
    bars.ended(task)


def _part(blobs: Path, file: _Weights) -> Path:
    return blobs / f"{file.sha256}.part"


def _bytes_of(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _refuse_full_disk(model: str, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise ModelError(f"{model} needs {size(needed)} more, and {constants.HF_HUB_CACHE} has {size(free)} free; make "
                         "room there, or set HF_HOME to a folder on a larger disk")


__all__ = ["pull"]
