"""`make` on a machine that lacks a program, or after an interrupted installation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def prepare(folder, python, **environ):
    return subprocess.run([ROOT / "tools" / "venv.sh", folder, python], capture_output=True, text=True, timeout=300,
                          env=os.environ | environ)


@pytest.fixture
def tools(tmp_path):
    """A PATH with a shell and this Python, and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "make"):
        if found := next((Path(place) / name for place in os.environ["PATH"].split(":")
                          if (Path(place) / name).exists()), None):
            (folder / name).symlink_to(found)
    return folder


def test_an_environment_without_pip_is_made_anew(tmp_path):
    folder = tmp_path / "venv"
    # What Debian leaves behind if python3-venv is missing.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (folder / "left").touch()
    done = prepare(folder, sys.executable)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([folder / "bin" / "python", "-m", "pip", "--version"], capture_output=True).returncode == 0
    assert not (folder / "left").exists()
    (folder / "kept").touch()
    assert prepare(folder, sys.executable).returncode == 0 and (folder / "kept").exists()


def test_what_is_missing_is_named(tmp_path, tools):
    broken = tmp_path / "broken" / "ensurepip"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError")
    done = prepare(tmp_path / "venv", sys.executable, PYTHONPATH=str(broken.parent))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1, f"make: {sys.executable} cannot make virtual environments (Debian: apt install python3-venv)")
    assert not (tmp_path / "venv").exists()
    done = prepare(tmp_path / "venv", "python3", PATH=str(tools))
    assert (done.returncode, done.stderr) == (1, "make: no python3 here; epdd needs Python 3.11 or newer (Debian: apt "
                                              "install python3 python3-venv)\n")
    done = prepare(Path(sys.prefix), sys.executable, PATH=str(tools))
    assert done.stderr == ("make: no C++ compiler, so CPUs decode at half the speed (Debian: apt install g++, then the "
                           "same again)\n")
    assert done.returncode == 0


def test_make_alone_starts_nothing(tools):
    if not (tools / "make").exists():
        pytest.skip("no make here")
    # Not as a part of the `make` that runs this test: it would announce the folder it enters.
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60, env=environ)
    assert (done.returncode, done.stdout.splitlines()[0].split()[:2]) == (0, ["make", "serve"])
