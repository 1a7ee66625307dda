"""`epdctl`: shows and controls a running daemon.

Exit codes: 0 success; 1 not ready (status), refused or failed; 2 wrong usage; 3 no daemon runs; 78 the daemon would
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

# States of a worker that show that the verb took effect.
EFFECTS = {"drain": ("DRAINING", "GONE"), "resume": ("READY", "STARTING")}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except client.CtlError as error:
        print(f"epdctl: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of stdout, `head` for example, has closed it.  Python must not complain when it flushes at exit.
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
    parser = argparse.ArgumentParser(prog="epdctl", description="Show and control a running epdd daemon.")
    parser.add_argument("--socket", metavar="PATH", help="admin socket of the daemon, if several run here")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = verbs.add_parser("status", help="show workers, queues, memory and latencies; exit code 1: not ready")
    verb.add_argument("--watch", action="store_true", help="refresh every second until Ctrl-C")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=_status)

    machine.add_verbs(verbs)
    routing.add_verbs(verbs)

    for name, run, text in (("drain", _steer, "let a worker finish its requests and give it no new ones"),
                            ("resume", _steer, "give work to a drained worker again, or restart a failed one"),
                            ("restart", _restart, "end a worker's process and start a new one in its place")):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("worker", metavar="WORKER", help="encoder/0, pd/0, ... as `epdctl status` shows them")
        verb.set_defaults(run=run)

    verb = verbs.add_parser("reload", help="apply [router], log.level, server.share_caches and API keys of the "
                            "settings file; if the file has an error, change nothing")
    verb.set_defaults(run=_reload)

    verb = verbs.add_parser("chat", help="ask the model one question, with or without images, and print its answer")
    verb.add_argument("-i", "--image", action="append", default=[], metavar="IMAGE", help="file or URL; repeatable")
    verb.add_argument("question", metavar="QUESTION", help="text of the question")
    verb.set_defaults(run=_chat)

    verb = verbs.add_parser("version", help="show the versions of epdctl and of the daemon")
    verb.set_defaults(run=_version)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
