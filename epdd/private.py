"""Checks whether other users of this machine could replace files in a folder.  Sockets are made and used only in
folders where they cannot."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def ours() -> set[int]:
    """Users that are trusted: our own and root."""
    return {os.geteuid(), 0}


def danger(folder: Path) -> str:
    """How other users than the folder's owner and root could replace the folder or its files; empty if they cannot.

    Raises OSError if the folder cannot be inspected.
    """
    link = os.lstat(folder)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in ours():
        return f"{folder} is a link that {_user(link.st_uid)} made"
    places = Path(os.path.realpath(folder))
    chain = [*reversed(places.parents), places]
    found = [place.stat() for place in chain]
    if not stat.S_ISDIR(found[-1].st_mode):
        return f"{folder} is not a folder"
    for at, (place, info) in enumerate(zip(chain, found)):
        if not _open_to_others(info):
            continue
        # In a sticky folder like /tmp everyone may add files, but change only their own.
        below = found[at + 1].st_uid if at + 1 < len(found) else info.st_uid
        if not (info.st_mode & stat.S_ISVTX and info.st_uid in ours()):
            return f"other users can write to {place} (mode {stat.S_IMODE(info.st_mode):04o})"
        if below not in ours():
            return f"{chain[at + 1]} is {_user(below)}'s, who may have made it to be mistaken for ours"
    return ""


def not_ours(folder: Path) -> str:
    """Why a socket must not be made in this folder; empty if it may.  Raises OSError as `danger` does."""
    owner = os.stat(folder).st_uid
    return danger(folder) or (f"{folder} is {_user(owner)}'s" if owner not in ours() else "")


def _open_to_others(info: os.stat_result) -> bool:
    """Whether other users than owner and root can write to it.  Root's group, and a group with the number of the owner,
    count as the owner."""
    group = info.st_mode & stat.S_IWGRP and info.st_gid not in (0, info.st_uid)
    return bool(info.st_mode & stat.S_IWOTH or group)


def _user(uid: int) -> str:
    return f"user {uid}"
