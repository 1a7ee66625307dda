"""File descriptors: each connection takes one, as do workers, image fetches and the log."""

from __future__ import annotations

import errno
import os
import resource

RESERVE = 512               # for other uses than connections: listeners, workers, fetches, epdctl, files
_RAISED_MAX = 1 << 20       # some systems allow 2**30, and some libraries loop over all that are allowed


def raise_limit() -> None:
    """Raise the soft limit of this process and its children to the hard limit.

    A shell's soft limit is mostly 1,024, for programs that use select(2).  epdd does not: the loop uses epoll, the
    fork server and the workers poll(2), which have no such limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _RAISED_MAX if hard == resource.RLIM_INFINITY else min(hard, _RAISED_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def for_connections() -> int:
    """How many connections may be open: the limit without the reserve, or half of a small limit.

    Read each time: an operator may change the limit of a running process (prlimit).
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _RAISED_MAX if soft == resource.RLIM_INFINITY else soft - min(RESERVE, soft // 2)


def exhausted() -> str:
    """Why no descriptor is free; empty if one is."""
    try:
        os.close(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return os.strerror(error.errno)
    return ""
