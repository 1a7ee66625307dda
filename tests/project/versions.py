"""Runs the tests that depend on transformers with its oldest and newest version in setup.cfg: `make versions`.

The versions are installed into build/versions, which precedes the environment on the path.  Requirements that the
environment has in a newer version are listed here; torch is too large for several versions.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST = ("transformers==5.17.0", "huggingface_hub<2", "httpx<1", "httpcore<2", "certifi")
NEWEST = ("transformers<6",)
TESTS = (
    "tests/worker/weights/test_load.py", "tests/worker/vision/test_encoder.py", "tests/worker/gpu",
    *(f"tests/worker/language/test_engine.py::test_greedy_equals_generate[{family}-64]"
      for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")),
    "tests/worker/language/test_engine.py::test_logprobs_come_with_the_tokens", "tests/hub",
)


def installed(name, packages):
    folder = ROOT / "build" / "versions" / name
    if not any(folder.glob("transformers-*.dist-info")):
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                        "--upgrade", "--target", folder, *packages], check=True)
    found = next(folder.glob("transformers-*.dist-info")).name
    return folder, found.removeprefix("transformers-").removesuffix(".dist-info")


def main():
    for name, packages in (("oldest", OLDEST), ("newest", NEWEST)):
        folder, number = installed(name, packages)
        if number == version("transformers"):
            print(f"transformers {number}: the environment's own")
            continue
        print(f"transformers {number}", flush=True)
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        done = subprocess.run([sys.executable, "-m", "pytest", *TESTS], cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
