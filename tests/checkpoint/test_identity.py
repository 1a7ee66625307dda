"""A checkpoint's files are recognised as the same or as different."""

import os
import shutil

import pytest

from epdd import families
from epdd.errors import ModelError
from epdd.checkpoint import identity


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(families.DEMO, tmp_path / "model")
    return tmp_path / "model"


def test_a_copy_is_the_same_and_so_is_a_touched_file(folder):
    before = identity.digest(str(families.DEMO))
    assert identity.digest(str(folder)) == before
    os.utime(folder / "model.safetensors", (1, 1))
    (folder / "README.md").write_text("other words")
    identity.check(str(folder), before)
    identity.check(str(folder), "")


@pytest.mark.parametrize("change", [
    lambda file: os.truncate(file, os.path.getsize(file) - 1),
    lambda file: os.truncate(file, 100),
    lambda file: os.truncate(file, 0),
    lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?"),
    lambda file: file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes())),
    lambda file: file.rename(file.with_name("model-1.safetensors")),
    lambda file: shutil.copy(file, file.with_name("more.safetensors")),
    lambda file: file.unlink(),
    lambda file: (file.parent / "config.json").write_text("{}"),
], ids=["cut by a byte", "cut short", "empty", "other end", "other weights", "renamed", "one more", "gone", "settings"])
def test_other_files_are_refused(folder, change):
    before = identity.digest(str(folder))
    change(folder / "model.safetensors")
    with pytest.raises(ModelError, match="not those that the daemon began with"):
        identity.check(str(folder), before)
