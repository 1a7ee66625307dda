"""The published benchmark's shape against a running daemon, by aiperf: 8 images of 1080p a request, ISL 128, OSL 256.

aiperf comes from PyPI and lives in a venv of its own (`python -m venv A && A/bin/pip install aiperf`):

    python tools/bench_aiperf.py --aiperf A/bin/aiperf --url http://127.0.0.1:8765 --rates 0.5 1 1.5

Prints one line a request rate and leaves aiperf's own files in the output folder.  Loopback only.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

COLUMNS = [("time_to_first_token", "TTFT ms"), ("inter_token_latency", "TPOT ms"), ("request_latency", "request ms")]


def profile(args, rate, folder, model):
    """Run aiperf at one rate; its summary as a dict."""
    command = [
        args.aiperf, "profile", "--model", model, "--url", args.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(args.tokenizer), "--request-rate", str(rate), "--arrival-pattern", "poisson",
        "--request-count", str(args.requests), "--isl", "128", "--osl", "256", "--image-batch-size", str(args.images),
        "--image-width-mean", "1920", "--image-height-mean", "1080", "--image-format", args.format,
        "--extra-inputs", "ignore_eos:true",
        "--random-seed", str(round(1000 * rate) + args.seed), "--output-artifact-dir", str(folder),
        "--ui", "none", "--num-dataset-entries", str(args.requests)]
    ended = subprocess.run(command, capture_output=True, text=True)
    summaries = list(folder.rglob("profile_export_aiperf.json"))
    if not summaries:
        sys.exit(f"aiperf failed ({ended.returncode}):\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}")
    return json.loads(summaries[0].read_text())


def value(summary, name, statistic):
    return (summary.get(name) or {}).get(statistic) or 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", default="aiperf", help="the aiperf program")
    parser.add_argument("--url", default="http://127.0.0.1:8765")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parents[1] / "epdd" / "demo")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 1.5])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--format", default="jpeg", choices=["jpeg", "png"])
    parser.add_argument("--seed", type=int, default=0, help="other pictures: a daemon that saw them has them cached")
    parser.add_argument("--out", type=Path, default=None, help="folder for aiperf's files")
    args = parser.parse_args()
    with urllib.request.urlopen(f"{args.url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    out = args.out or Path(tempfile.mkdtemp(prefix="epdd-aiperf-"))
    print("requests/s  done  errors " + "".join(f"{title + ' p50':>16}{'p99':>10}" for _, title in COLUMNS)
          + "   tokens/s  requests/s")
    for rate in args.rates:
        summary = profile(args, rate, out / f"rate-{rate:g}", model)
        done, errors = value(summary, "request_count", "avg"), value(summary, "error_request_count", "avg")
        cells = "".join(f"{value(summary, name, 'p50'):16.1f}{value(summary, name, 'p99'):10.1f}"
                        for name, _ in COLUMNS)
        print(f"{rate:10g}{done:6.0f}{errors:8.0f} {cells}{value(summary, 'output_token_throughput', 'avg'):11.1f}"
              f"{value(summary, 'request_throughput', 'avg'):12.3f}", flush=True)
    print(f"aiperf's files: {out}")


if __name__ == "__main__":
    main()
