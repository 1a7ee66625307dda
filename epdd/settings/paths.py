"""Where the settings file and the admin sockets lie.  All that `epdctl` needs to find a daemon, and quick to import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SYSTEM_FILE = Path("/etc/epdd/epdd.toml")


def runtime_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of the admin sockets: systemd's RuntimeDirectory, else the user's, else a private one in /tmp."""
    environ = os.environ if environ is None else environ
    if environ.get("RUNTIME_DIRECTORY"):
        return Path(environ["RUNTIME_DIRECTORY"].split(":")[0])
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "epdd"
    return Path(f"/tmp/epdd-{os.getuid()}")
