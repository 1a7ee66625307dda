"""Image files of this machine, by file: URL: regular files below media.folders, and nothing else.

A path outside them is refused without a system call, so an answer reveals nothing about it.  Links inside are followed
if they end inside.  The resolved path is then opened folder by folder without following links, so a link that appears
meanwhile has no effect.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from epdd.errors import ConfigError, MediaError

_URL_CHARS_MAX = 3 * 4096       # Linux' longest path, every byte of it escaped
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe must not wait for its other end.  `_read` refuses it.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Folders:
    """The folders that images may be read from."""

    def __init__(self, folders: Sequence[str], bytes_max: int) -> None:
        """`bytes_max` of one file.  Raises ConfigError if one is not a folder, or is the root folder."""
        self._bytes_max = bytes_max
        self._named = [_checked(folder) for folder in folders]
        self._real = [os.path.realpath(folder) for folder in self._named]

    def read(self, url: str) -> bytes:
        """The file's bytes; waits for the disk.

        Raises MediaError: invalid_image_url for a path outside, image_file_not_found if it is not a readable regular
        file, image_file_too_large.
        """
        if not self._named:
            raise MediaError("Images by file: URL are switched off on this server", code="invalid_image_url")
        path = _path(url)
        if path is None or _inside(path, self._named) is None:
            raise _outside()
        try:
            real = os.path.realpath(path)
        except OSError:     # a link went away while it was read
            raise _outside() from None
        folder = _inside(real, self._real)
        if folder is None:
            raise _outside()
        try:
            at = _opened(folder, real[len(folder) + 1:].split(b"/"))
            try:
                data = _read(at, self._bytes_max)
            finally:
                os.close(at)
        except OSError:
            raise _not_found() from None
        if data is None or len(data) > self._bytes_max:
            raise MediaError(f"The image file is over the limit of {self._bytes_max} bytes",
                             code="image_file_too_large")
        return data


def _checked(folder: str) -> bytes:
    path = os.path.normpath(folder)
    if not os.path.isabs(folder) or not os.path.isdir(path):
        raise ConfigError(f"media.folders has {folder!r}, which is not the full path of a folder")
    if os.path.realpath(path) == "/":
        raise ConfigError(f"media.folders has {folder!r}, which would let requests read every file")
    return os.fsencode(path)


def _path(url: str) -> bytes | None:
    """The path of file:///path; None if the URL has a host or the path has empty, "." or ".." parts."""
    if url[:8].lower() != "file:///" or len(url) > _URL_CHARS_MAX:
        return None
    path = unquote_to_bytes(url[7:])
    steps = path.split(b"/")[1:]
    return None if b"\0" in path or any(step in (b"", b".", b"..") for step in steps) else path


def _inside(path: bytes, folders: Sequence[bytes]) -> bytes | None:
    return next((folder for folder in folders if path.startswith(folder + b"/")), None)


def _opened(folder: bytes, steps: Sequence[bytes]) -> int:
    """A descriptor of the file at `steps` below `folder`.  Raises OSError."""
    at = os.open(folder, _FOLDER)
    try:
        for step in steps[:-1]:
            below = os.open(step, _FOLDER, dir_fd=at)
            os.close(at)
            at = below
        return os.open(steps[-1], _FILE, dir_fd=at)
    finally:
        os.close(at)


def _read(at: int, bytes_max: int) -> bytes | None:
    """The file behind a descriptor; None or more than `bytes_max` bytes if it is too large.  Raises OSError."""
    found = os.fstat(at)
    if not stat.S_ISREG(found.st_mode):
        raise OSError
    if found.st_size > bytes_max:
        return None
    # `open` does not close a descriptor that it refuses, such as a folder's.  The file may grow while it is read.
    with open(at, "rb", closefd=False) as file:
        return file.read(bytes_max + 1)


def _outside() -> MediaError:
    return MediaError("The file: URL does not lead into a folder that this server reads images from",
                      code="invalid_image_url")


def _not_found() -> MediaError:
    return MediaError("The image file is not there, or cannot be read", code="image_file_not_found")
