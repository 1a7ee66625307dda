"""Each client in an environment of its own, with the versions pinned beside this file: `make clients`.

They lie in EPDD_CLIENTS, or in build/clients, with names made from their contents, and are made once.  Tests of missing
clients are skipped, so `make test` downloads no clients.  Standard library only.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
PINS = HERE / "pins"
PROGRAMS = HERE / "programs"
NAMES = ("langchain", "node", "litellm", "aiperf", "vllm")
INSTALL_S = 600


class Unavailable(Exception):
    """The client cannot be run here; the message says why."""


def cache():
    return Path(os.environ.get("EPDD_CLIENTS") or HERE.parents[1] / "build" / "clients").absolute()


def place(name):
    """The environment's folder: another one for each set of versions, Python and place of epdd's own packages."""
    pins = PINS / ("package-lock.json" if name == "node" else f"{name}.txt")
    key = hashlib.sha256(pins.read_bytes() + f"{sys.version} {sysconfig.get_path('purelib')}".encode())
    return cache() / f"{name}-{key.hexdigest()[:12]}"


def found(name):
    """The folder of an installed client; waits for a running installation.  Raises Unavailable."""
    folder = place(name)
    if cache().exists():
        with _locked(fcntl.LOCK_SH):
            if (folder / "complete").exists():
                return folder
            if (folder / "failed").exists():
                raise Unavailable(f"{name} could not be installed: {(folder / 'failed').read_text()}")
    raise Unavailable(f"{name} is not installed: run `make clients`")


def install(name):
    """Make the environment if it is missing.  Raises Unavailable with the end of the installer's output."""
    folder = place(name)
    if (folder / "complete").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        _npm(folder) if name == "node" else _pip(name, folder)
    except Unavailable as error:
        (folder / "failed").write_text(str(error))
        raise
    (folder / "complete").touch()


def _pip(name, folder):
    _run(sys.executable, "-m", "venv", folder)
    if name == "vllm":
        # torch is most of what vLLM needs, and epdd has it; what is pinned here comes first all the same.
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "epdd.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # The pins are complete: nothing is left to resolve, and modules are compiled when they are used.
    _run(folder / "bin" / "pip", "install", "--quiet", "--no-deps", "--no-compile", "-r", PINS / f"{name}.txt")


def _npm(folder):
    if not shutil.which("npm"):
        raise Unavailable("npm is missing")
    for file in ("package.json", "package-lock.json"):
        shutil.copy(PINS / file, folder)
    _run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", folder)


def _run(*command):
    try:
        ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=INSTALL_S,
                               stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took over {INSTALL_S} s") from None
    if ended.returncode:
        raise Unavailable(" ".join(ended.stderr.strip().splitlines()[-2:])[:500])


@contextmanager
def _locked(how):
    with open(cache() / "lock", "w") as lock:
        fcntl.flock(lock, how)
        yield


def main():
    cache().mkdir(parents=True, exist_ok=True)
    with _locked(fcntl.LOCK_EX):
        for name in NAMES:
            try:
                install(name)
            except Unavailable as error:
                print(f"client {name}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
