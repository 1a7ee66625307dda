"""Checks the names that a Hub gives to contents and snapshots, because they become paths in the local cache.

huggingface_hub does not check them: with "../" in an ETag a hostile Hub could write any file that the user may write.
"""

from __future__ import annotations

import re
from typing import Any

from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory

from epdd.errors import ModelError

SHA256 = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")
_HEADERS = ("ETag", "X-Linked-ETag", "X-Repo-Commit")


def checked(name: str, form: re.Pattern[str], what: str) -> str:
    """`name`, if it has this form.  Raises ModelError otherwise."""
    if not form.fullmatch(name):
        raise ModelError(f"The Hub gives {name[:100]!r} as {what}, which is none; check HF_ENDPOINT")
    return name


def watch_answers() -> None:
    """Checks the headers of every answer to huggingface_hub from now on.  A bad name raises ModelError."""
    set_client_factory(_client)


def _client() -> Any:
    client = default_client_factory()
    client.event_hooks["response"].append(_check)
    return client


def _check(response: Any) -> None:
    for header in _HEADERS:
        name = response.headers.get(header, "")
        if "/" in name.removeprefix("W/") or name.strip('"') in (".", ".."):
            raise ModelError(f"The Hub gives {name[:100]!r} as {header} of a file, which cannot be a name in the local "
                             "cache; check HF_ENDPOINT")
