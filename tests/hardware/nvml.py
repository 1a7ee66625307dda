"""Runs epdd.hardware.gpus in a process with a stub of the driver library (nvml_stub.c)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_CODE = """
import dataclasses, json, sys
from pathlib import Path
from epdd.hardware import cpu, gpus, nodes
root = Path(sys.argv[1])
usable = cpu.online(root)
found, warnings = gpus.read(root, usable, nodes.read(root, usable))
print(json.dumps([[dataclasses.asdict(gpu) for gpu in found], warnings]))
"""


_LOST = "from epdd.hardware import gpus; print(gpus.lost(0))"


def build(folder: Path) -> Path:
    """Compile the stub into a folder for LD_LIBRARY_PATH."""
    subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"),
                    str(Path(__file__).with_name("nvml_stub.c"))], check=True)
    return folder


def read(library: Path, sysroot: Path, stub: str, **environ: str) -> tuple[list[dict[str, Any]], list[str]]:
    """GPUs and warnings, with the stub's GPUs over the files of `sysroot`."""
    found, warnings = json.loads(_run(library, [_CODE, str(sysroot)], stub, environ))
    return found, warnings


def lost(library: Path, stub: str, **environ: str) -> str:
    """The result for GPU 0 after its worker's death."""
    return _run(library, [_LOST], stub, environ).strip()


def _run(library: Path, arguments: list[str], stub: str, environ: dict[str, str]) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, check=True,
                          env=inherited | {"LD_LIBRARY_PATH": str(library), "NVML_STUB": stub} | environ)
    return done.stdout
