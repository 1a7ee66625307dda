"""Listening on a Unix socket: permissions, and existing files in its place."""

from __future__ import annotations

import grp
import os
import socket
import stat
from pathlib import Path

import pytest

from epdd import unix_socket
from epdd.errors import ConfigError, StartupError


def mode(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_private_unless_told_otherwise(tmp_path: Path) -> None:
    for name, asked, group, found in (("a", 0o600, "", 0o600), ("b", 0o666, "", 0o666),
                                      ("c", 0o600, grp.getgrgid(os.getgid()).gr_name, 0o660)):
        with unix_socket.listen(tmp_path / "run" / name, asked, group, "x"):
            assert mode(tmp_path / "run" / name) == found
    assert mode(tmp_path / "run") == 0o700


def test_what_lies_there_already(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with unix_socket.listen(path, 0o600, "", "x"):
        with pytest.raises(StartupError, match="x: another daemon listens"):
            unix_socket.listen(path, 0o600, "", "x")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    with unix_socket.listen(path, 0o600, "", "x"):      # its owner was killed
        pass
    path.unlink()
    path.write_text("precious")
    with pytest.raises(StartupError, match="no socket"):
        unix_socket.listen(path, 0o600, "", "x")
    assert path.read_text() == "precious"


def test_what_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="x: no group"):
        unix_socket.listen(tmp_path / "s", 0o600, "nobody-is-called-that", "x")
    with pytest.raises(StartupError, match="too long"):
        unix_socket.listen(tmp_path / ("s" * 120), 0o600, "", "x")
