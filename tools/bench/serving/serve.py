"""One load against any OpenAI-compatible server, and servers side by side on the same checkpoint and the same CPUs.

    python -m tools.random_model R --shape 100m
    python -m tools.bench.serving.serve run --aiperf A/bin/aiperf --model R --out cmp --rates 0.05 0.1 --start epdd
    python -m tools.bench.serving.serve run --aiperf A/bin/aiperf --model R --out cmp --rates 0.05 0.1 \
        --start transformers --python V/bin/python
    python -m tools.bench.serving.serve run --aiperf A/bin/aiperf --model R --out cmp --rates 0.05 0.1 --name other \
        --url http://127.0.0.1:8000
    python -m tools.bench.serving.serve compare cmp

`run` measures one server, at each rate of Poisson arrivals and with a constant number of requests (saturation).  Each
adds a folder with aiperf's own files, so that a comparison can be made in pieces.  `--start` starts the server too:
`epdd`; `one-process`, epdd's parts in one process as colocated servers have them (tools/bench/serving/one_process.py);
`transformers`, transformers' own server (tools/bench/serving/transformers_serve.py), from a venv with
`transformers[serving]`.
`compare` makes tables and plots of all measurements: TTFT and TPOT (a request's mean time between tokens), the gaps
between tokens one by one, throughput, and ratios to the first server.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tools import launch
from tools.bench.report import Report
from tools.bench.serving import aiperf_load, serve_tables
from tools.bench.serving.aiperf_load import Arrivals, Load

KINDS = ("epdd", "one-process", "transformers")


def server(args: argparse.Namespace) -> launch.Server:
    """The server of `--start`, not started yet."""
    if args.start == "transformers":
        port = launch.free_port()
        command = [args.python, "-m", "tools.bench.serving.transformers_serve", args.model, "--host", "127.0.0.1",
                   "--port", str(port),
                   "--device", "cpu", "--dtype", args.dtype]
        return launch.Server(command, f"http://127.0.0.1:{port}", args.cpus)
    settings = [f"model.dtype={args.dtype}", *args.set]
    if args.start == "epdd":
        return launch.Daemon("--model", args.model, settings=settings, cpus=args.cpus)
    return launch.Daemon("--model", args.model, settings=["encoder.workers=1", "pd.workers=1", *settings],
                         cpus=args.cpus, program=["-m", "tools.bench.serving.one_process"])


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[str]:
    """The base URL of a server that is ready."""
    if not args.start:
        yield args.url
        return
    with server(args) as child:
        print(f"{args.start} is ready after {child.ready():.1f} s", file=sys.stderr)
        yield child.url


def run(args: argparse.Namespace) -> None:
    name = args.name or args.start
    if not name or not (args.start or args.url):
        sys.exit("say --start, or --url and --name")
    load = Load(args.images, args.width, args.height, args.isl, args.osl)
    points = [Arrivals(args.requests, rate=rate) for rate in args.rates]
    points += [Arrivals(args.requests, at_once=count) for count in args.at_once]
    extra = json.loads(args.extra)
    with serving(args) as url:
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        if args.warm_up:
            points.insert(0, Arrivals(args.warm_up, at_once=1))
        for number, arrivals in enumerate(points):
            where = args.out / name / str(arrivals).replace(" ", "-")
            try:
                found = aiperf_load.run(args.aiperf, url, model, Path(args.model), load, arrivals,
                                        args.seed + number, where / "aiperf", extra)
            except aiperf_load.AiperfFailed as error:
                sys.exit(str(error))
            if number or not args.warm_up:
                found |= {"server": name, "load": asdict(load), "cpus": args.cpus}
                (where / "point.json").write_text(json.dumps(found, indent=1) + "\n")
                print(f"{name} {arrivals}: {serve_tables.line(found)}", flush=True)


def compare(args: argparse.Namespace) -> None:
    found = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*/*/point.json"))]
    if not found:
        sys.exit(f"nothing was measured in {args.folder}")
    loads = {json.dumps(point["load"]) for point in found}
    if len(loads) > 1:
        sys.exit("different loads cannot be compared: " + "; ".join(sorted(loads)))
    report = Report(args.folder)
    serve_tables.write(report, found, args.base)
    report.close(points=found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="measure one server")
    one.add_argument("--aiperf", default="aiperf", help="the aiperf program")
    one.add_argument("--start", choices=KINDS, help="a server to start, and to stop at the end")
    one.add_argument("--url", help="base URL of one that runs")
    one.add_argument("--name", help="in the tables (default: what is started)")
    one.add_argument("--model", required=True, help="checkpoint folder: for the server, and its tokenizer for aiperf")
    one.add_argument("--python", default=sys.executable, help="interpreter with transformers[serving]")
    one.add_argument("--cpus", default="", help="of the started server, like 0-3 (default: all); aiperf takes any")
    one.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "auto"])
    one.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of epdd")
    one.add_argument("--rates", type=float, nargs="*", default=[], help="requests a second, Poisson")
    one.add_argument("--at-once", type=int, nargs="*", default=[], help="constant numbers of requests (saturation)")
    one.add_argument("--requests", type=int, default=30, help="at each rate")
    one.add_argument("--warm-up", type=int, default=2, metavar="REQUESTS", help="before, one after the other")
    one.add_argument("--images", type=int, default=4)
    one.add_argument("--width", type=int, default=448)
    one.add_argument("--height", type=int, default=448)
    one.add_argument("--isl", type=int, default=128, help="tokens of text, without the images'")
    one.add_argument("--osl", type=int, default=64, help="tokens of the answer")
    one.add_argument("--extra", default="{}", help='more fields of a request, like \'{"ignore_eos": true}\'')
    one.add_argument("--seed", type=int, default=0, help="other pictures: a server that saw them may have them cached")
    one.add_argument("--out", type=Path, default=Path("serve"))
    one.set_defaults(do=run)
    all_of_them = commands.add_parser("compare", help="tables and plots of all that was measured")
    all_of_them.add_argument("folder", type=Path)
    all_of_them.add_argument("--base", default="epdd", help="the server that ratios refer to")
    all_of_them.set_defaults(do=compare)
    args = parser.parse_args()
    try:
        args.do(args)
    except KeyboardInterrupt:
        sys.exit(130)           # with it, its server and aiperf have ended


if __name__ == "__main__":
    main()
