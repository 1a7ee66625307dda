"""Time and memory of loading an FP8 checkpoint, beside the same one in bfloat16.

    python -m tools.bench.workers.load --shape 500m

Writes a random checkpoint in bfloat16 and the same in FP8 (blocks of 128 x 128, as Qwen publishes it), then loads
the language half of each in new processes by turns.  A load ends when every weight has been read once: bfloat16 weights
are file pages, which take their time when they are first touched.  The files are in the page cache; `--cold`
drops them before each load (root only), so that the disk counts too.  Prints medians, their ratio, and the highest
resident memory beside that of the weights alone.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = 128
CHILD = """
import resource, sys, time
import torch
from epdd.worker import preload   # imports the models' code, as the workers' fork server does
from epdd.worker.weights import load
torch.set_num_threads(int(sys.argv[2]))
def resident(kind):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(kind))
open("/proc/self/clear_refs", "w").write("5")      # the high-water mark begins anew
before, began = resident("VmRSS"), time.perf_counter()
model = load.load_language(sys.argv[1], "bfloat16", "cpu", "sdpa")
loaded = time.perf_counter()
total = sum(float(p.detach().view(-1).view(torch.int16)[::1024].sum()) for p in model.parameters())
print(time.perf_counter() - began, loaded - began, resident("VmHWM") - before,
      sum(p.nbytes for p in model.parameters()))
"""


def quantise(source: Path, target: Path) -> None:
    """Write `source` to `target` with all matrices of the layers in FP8."""
    import torch
    from safetensors.torch import load_file, save_file
    shutil.copytree(source, target)
    for path in source.glob("*.safetensors"):
        made = {}
        for name, tensor in load_file(path).items():
            if tensor.ndim != 2 or not ("layers." in name or "blocks." in name):
                made[name] = tensor
                continue
            rows, columns = tensor.shape
            scales = torch.full((-(-rows // BLOCK), -(-columns // BLOCK)), float(tensor.abs().max()) / 448)
            made[name] = (tensor.float() / scales[0, 0]).to(torch.float8_e4m3fn)
            made[name + "_scale_inv"] = scales
        save_file(made, target / path.name, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                                     "weight_block_size": [BLOCK, BLOCK]}
    (target / "config.json").write_text(json.dumps(config))


def load(folder: Path, threads: int, cold: bool) -> list[float]:
    """[seconds until all is read, seconds of the loader, bytes above the start, bytes of the weights]."""
    if cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    done = subprocess.run([sys.executable, "-c", CHILD, folder, str(threads)], check=True, capture_output=True,
                          text=True)
    return [float(word) for word in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="500m", help="of tools/random_model.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each load")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="epdd-load-") as scratch:
        folders = {"bfloat16": Path(scratch, "plain"), "fp8": Path(scratch, "fp8")}
        subprocess.run([sys.executable, "-m", "tools.random_model", folders["bfloat16"],
                        "--shape", args.shape, "--dtype", "bfloat16"], check=True)
        quantise(folders["bfloat16"], folders["fp8"])
        found: dict[str, list[list[float]]] = {kind: [] for kind in folders}
        for _ in range(args.rounds):
            for kind, folder in folders.items():
                found[kind].append(load(folder, args.threads, args.cold))
        times = {}
        for kind, rows in found.items():
            whole, loader, peak, weights = (statistics.median(column) for column in zip(*rows))
            times[kind] = whole
            print(f"{kind:9} {whole:6.2f} s ({min(row[0] for row in rows):.2f} to {max(row[0] for row in rows):.2f}; "
                  f"loader {loader:.2f}), peak {peak / 2**20:,.0f} MiB for {weights / 2**20:,.0f} MiB of weights")
        print(f"fp8 / bfloat16 {times['fp8'] / times['bfloat16']:.2f}")


if __name__ == "__main__":
    main()
