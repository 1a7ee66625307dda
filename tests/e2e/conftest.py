import sys

import pytest


@pytest.fixture
def started_by(monkeypatch, tmp_path):
    """`started_by(script)`: the daemon is started by this shell script, which ends in `exec "$@"`."""
    def set_up(script):
        starter = tmp_path / "starter"
        starter.write_text(f"#!/bin/sh\nset -- {sys.executable} \"$@\"\n{script}")
        starter.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(starter))
    return set_up
