"""Listening Unix sockets.  They are private from the start; the socket of a killed daemon is replaced."""

from __future__ import annotations

import grp
import os
import socket
import stat
from pathlib import Path

from epdd import private
from epdd.errors import AddressTaken, ConfigError, StartupError

_BACKLOG = 128


def listen(path: Path, mode: int, group: str, setting: str) -> socket.socket:
    """A listening socket with file permissions `mode`; `group`, if given, owns it and may use it.

    `setting` names the socket in errors.  Raises ConfigError (no such group), AddressTaken (another daemon listens
    there), StartupError (it cannot be made, or other users could replace its folder).
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if reason := private.not_ours(path.parent):
            raise StartupError(f"{setting}: {reason}, so other users could take the socket's place; name one in a "
                               "folder that only the daemon's user can write to, or remove this one")
        _clear_stale(path, setting)
        listener = socket.socket(socket.AF_UNIX)
        try:
            # Created for the owner alone, then given to the group, and only then opened to the group.
            mask = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(mask)
            if group:
                os.chown(path, -1, grp.getgrnam(group).gr_gid)
                mode |= 0o060
            os.chmod(path, mode)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener
    except KeyError:
        raise ConfigError(f"{setting}: no group {group!r}") from None
    except OSError as error:
        raise StartupError(f"{setting}: {path}: {error.strerror or error}") from None


def _clear_stale(path: Path, setting: str) -> None:
    """Remove the socket of a killed daemon, never that of a running one."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise StartupError(f"{setting}: {path} is there and no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise AddressTaken(f"{setting}: another daemon listens on {path}")
