"""File descriptors: each connection takes one, and so do workers, images that are fetched and the log."""

from __future__ import annotations

import errno
import os
import resource

RESERVE = 512               # for all but connections: listeners' backlogs, workers, fetches, epdctl, files
_RAISED_MAX = 1 << 20       # some systems allow 2**30, and some libraries walk through all that are allowed


def raise_limit() -> None:
    """Allow this process and its children as many as the system lets them have.

    A shell's soft limit is mostly 1,024, for programs that use select(2).  Nothing here does: the loop uses epoll,
    the fork server and the workers poll(2), which take descriptors of any number.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _RAISED_MAX if hard == resource.RLIM_INFINITY else min(hard, _RAISED_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def for_connections() -> int:
    """How many connections there may be: what is left after the reserve, of a small limit the half.

    Read anew each time: an operator may change the limit of a running process (prlimit).
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _RAISED_MAX if soft == resource.RLIM_INFINITY else soft - min(RESERVE, soft // 2)


def exhausted() -> str:
    """Why no file can be opened now, neither here nor by an accept; empty if one can."""
    try:
        os.close(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return os.strerror(error.errno)
    return ""
