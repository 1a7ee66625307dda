"""Trusted folders: those that no other user can change."""

import os
import stat

import pytest

from epdd import private


def test_ours_is_safe_and_what_others_can_write_to_is_not(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    assert private.danger(folder) == private.not_ours(folder) == ""
    for mode, safe in ((0o755, True), (0o777, False), (0o707, False), (0o1777, True)):
        folder.chmod(mode)
        assert (private.danger(folder) == "") is safe, oct(mode)
    folder.chmod(0o700)
    tmp_path.chmod(0o777)       # a user who can write to the parent can replace it
    assert f"write to {tmp_path} (mode 0777)" in private.danger(folder)
    tmp_path.chmod(0o1777)
    assert private.danger(folder) == ""
    tmp_path.chmod(0o700)


def test_links_and_files(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert private.danger(tmp_path / "link") == ""      # made by this user
    (tmp_path / "file").touch()
    assert "not a folder" in private.danger(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        private.danger(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to another user")
def test_another_users(tmp_path):
    folder, link = tmp_path / "run", tmp_path / "link"
    folder.mkdir(0o700)
    os.chown(folder, 65534, 65534)
    assert private.danger(folder) == "" and "user 65534" in private.not_ours(folder)    # made by root
    tmp_path.chmod(0o1777)
    assert f"{folder} is user 65534's" in private.danger(folder)                        # any user could have made it
    tmp_path.chmod(0o700)
    folder.chmod(0o1777)
    assert "can write to" in private.danger(folder)         # its owner may rename all that is in it
    link.symlink_to("/")
    os.lchown(link, 65534, 65534)
    assert "link that user 65534 made" in private.danger(link)
    os.chown(folder, 0, 1)
    folder.chmod(stat.S_IRWXU | stat.S_IRWXG)
    assert "can write to" in private.danger(folder)         # a group's
    os.chown(folder, 0, 0)
    assert private.danger(folder) == ""
