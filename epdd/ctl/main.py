"""`epdctl`: looks at the daemon and steers it.

Exit codes: 0 good; 1 not ready (status), refused or failed; 2 wrong usage; 3 no daemon runs; 78 the daemon would
not start (plan).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from epdd import __version__
from epdd.ctl import client, machine, routing

# What a worker's state is once the verb has had its effect.
EFFECTS = {"drain": ("DRAINING", "GONE"), "resume": ("READY", "STARTING")}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except client.CtlError as error:
        print(f"epdctl: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader, `head` say, has enough; the interpreter must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _status(args: argparse.Namespace) -> int:
    if args.watch:
        from epdd.ctl.watch import watch
        return watch(lambda: client.socket_of(args.socket))
    snapshot = client.ask(client.socket_of(args.socket), "status")
    if args.json:
        print(json.dumps(snapshot, indent=2))
    else:
        from epdd.ctl import render
        try:
            print(render.status(snapshot, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
        except KeyError as error:
            raise client.CtlError(f"the daemon's answer has no {error}; is it of another version?") from None
    return 0 if snapshot["state"] == "ready" else 1


def _steer(args: argparse.Namespace) -> int:
    state = client.ask(client.socket_of(args.socket), args.verb, worker=args.worker)
    if state not in EFFECTS[args.verb]:
        raise client.CtlError(f"cannot {args.verb} {args.worker}: it is {state}")
    print(f"{args.worker} {state}")
    return 0


def _restart(args: argparse.Namespace) -> int:
    client.ask(client.socket_of(args.socket), "restart", worker=args.worker)
    print(f"{args.worker} restarts")
    return 0


def _reload(args: argparse.Namespace) -> int:
    print(client.ask(client.socket_of(args.socket), "reload"))
    return 0


def _chat(args: argparse.Namespace) -> int:
    host, port, uid = client.listener(client.socket_of(args.socket))
    for part in client.chat(host, port, uid, args.question, args.image):
        print(part, end="", flush=True)
    print()
    return 0


def _version(args: argparse.Namespace) -> int:
    print(f"epdctl {__version__}")
    try:
        print(f"epdd {client.ask(client.socket_of(args.socket), 'version')}")
    except client.NotRunning:
        print("epdd not running")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="epdctl", description="Look at the epdd daemon and steer it.")
    parser.add_argument("--socket", metavar="PATH", help="admin socket (default: the only daemon's that runs here)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = verbs.add_parser("status", help="show workers, queues, memory and latencies")
    verb.add_argument("--watch", action="store_true", help="refresh each second until Ctrl-C")
    verb.add_argument("--json", action="store_true", help="for programs")
    verb.set_defaults(run=_status)

    machine.add_verbs(verbs)
    routing.add_verbs(verbs)

    for name, run, text in (("drain", _steer, "let a worker finish what it has and give it nothing new"),
                            ("resume", _steer, "give a drained worker work again, or try a failed one anew"),
                            ("restart", _restart, "end a worker's process; a new one takes its place")):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("worker", metavar="WORKER", help="encoder/0, pd/0, ... as in status")
        verb.set_defaults(run=run)

    verb = verbs.add_parser("reload", help="read the settings file again: [router], log level, API keys; fails if it "
                            "is refused")
    verb.set_defaults(run=_reload)

    verb = verbs.add_parser("chat", help="ask the model, with or without images")
    verb.add_argument("-i", "--image", action="append", default=[], metavar="IMAGE", help="file or web address")
    verb.add_argument("question", metavar="QUESTION")
    verb.set_defaults(run=_chat)

    verb = verbs.add_parser("version", help="show the versions of epdctl and the daemon")
    verb.set_defaults(run=_version)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
