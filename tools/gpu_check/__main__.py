"""Checks everything that needs a GPU, results and speed, in one run of less than eight minutes.

    python3 -m tools.gpu_check --out DIR [--wheels DIR]
    python3 -m tools.gpu_check --out DIR --cpu

Runs in the root of a working tree, uninstalled, with torch and transformers; `--wheels` names a folder with wheels of
other packages that are missing (docs/howto/gpus.md has the list and the command that fetches them).  Each part is a
process with its own time limit; one that fails is a row of the table and stops no other.  DIR gets rows as JSON, each
part's log and the table, which is also printed.  `--cpu` rehearses every part at small size without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 470.0             # of all parts together
REHEARSAL = 10              # factor on time limits without a GPU: the machine may be slow
# (name, seconds at most), the most important first, after the parts that they need
PARTS = (("checkpoint", 90), ("correct", 100), ("handover", 60), ("decode", 110), ("encoder", 60), ("serve", 150),
         ("ratio", 60))
# Module -> distribution, which a machine with torch, transformers, aiohttp and uvloop may lack.
WHEELS = {"jinja2": "jinja2", "markupsafe": "markupsafe", "llguidance": "llguidance", "msgspec": "msgspec",
          "multiprocess": "multiprocess", "dill": "dill", "numa": "py-libnuma", "numpy": "numpy",
          "pynvml": "nvidia-ml-py", "orjson": "orjson", "PIL": "pillow", "prometheus_client": "prometheus-client",
          "rich": "rich", "markdown_it": "markdown-it-py", "mdurl": "mdurl", "pygments": "pygments",
          "safetensors": "safetensors", "simplejpeg": "simplejpeg", "tokenizers": "tokenizers"}


def missing() -> list[str]:
    return [name for module, name in WHEELS.items() if importlib.util.find_spec(module) is None]


def install(wheels: Path, site: Path) -> None:
    """Each separately, so that one that does not fit this Python does not block the others."""
    for name in missing():
        done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                               "--no-index", "--no-deps", "--find-links", wheels, "--target", site, name],
                              capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: {(done.stderr.strip().splitlines() or ['not installed'])[-1]}")


def run(part: str, limit_s: float, out: Path, work: Path, site: Path, cpu: bool) -> list[dict[str, object]]:
    """A part's rows; a failure is a row."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, site))),
                                "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if cpu:     # a rehearsal shares the CPUs with other programs
        environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "tools.gpu_check.parts", part, "--out", str(out), "--work", str(work),
               *(["--cpu"] if cpu else [])]
    began = time.monotonic()
    fault = ""
    with open(out / f"{part}.log", "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            if process.wait(limit_s):
                fault = f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            fault = f"took longer than {limit_s:.0f} s"
            os.killpg(process.pid, 9)       # with its own child processes
            process.wait()
    rows = lines(out / f"{part}.jsonl")
    if fault:
        said = [line for line in (out / f"{part}.log").read_text(errors="replace").splitlines() if line.strip()]
        last = said[-1][:90] if said else ""
        rows.append({"part": part, "what": "FAILED", "value": fault, "unit": "", "note": last})
    print(f"{part}: {time.monotonic() - began:.0f} s{', ' + fault if fault else ''}", flush=True)
    return rows


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: list[dict[str, object]]) -> str:
    def text(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    cells = [[text(row[key]) for key in ("part", "what", "value", "unit", "note")] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.rjust(width) if i == 2 else cell.ljust(width)
                               for i, (cell, width) in enumerate(zip(line, widths))).rstrip() for line in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is found")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to take what is missing from")
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU, at small size")
    parser.add_argument("--parts", default=",".join(name for name, _ in PARTS), help="some of them only")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = args.parts.split(",")
    for name in wanted:
        (args.out / f"{name}.jsonl").unlink(missing_ok=True)
    work = Path(tempfile.mkdtemp(prefix="epdd-gpu-check-"))
    rows: list[dict[str, object]] = []
    patience = REHEARSAL if args.cpu else 1
    end = time.monotonic() + TOTAL_S * patience
    try:
        if args.wheels:
            install(args.wheels, work / "site")
        elif missing():
            print(f"missing, see --wheels: {' '.join(missing())}")
        for name, limit_s in PARTS:
            if name in wanted:
                rows += run(name, max(1.0, min(limit_s * patience, end - time.monotonic())), args.out.absolute(), work,
                            work / "site", args.cpu)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        (args.out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    shown = table(rows)
    (args.out / "table.txt").write_text(shown + "\n")
    print(shown)
    sys.exit(any(row["what"] == "FAILED" for row in rows))


if __name__ == "__main__":
    main()
