"""Unix sockets to listen on: private from their first moment; a killed daemon's is replaced, a living one's never."""

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
    """A listening socket that its owner, and `group` if it is named, can open as the permissions `mode` say.

    `setting` names it in errors.  Raises ConfigError (no such group), AddressTaken (another daemon listens there),
    StartupError (it cannot be made, or other users could change its folder).
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if reason := private.not_ours(path.parent):
            raise StartupError(f"{setting}: {reason}, so other users could take the socket's place; name one in a "
                               "folder that only the daemon's user can write to, or remove this one")
        _clear_stale(path, setting)
        listener = socket.socket(socket.AF_UNIX)
        try:
            # Created closed to all others; opened to a group only once it belongs to it.
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
    """Remove the socket of a daemon that was killed; never that of a living one."""
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
