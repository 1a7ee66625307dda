"""`epdd`: serve a model, look at one, fetch one, plan for one.

Exit codes: 0 good; 2 wrong usage; 78 where trying again without a change cannot help, 75 where it may; 130 Ctrl-C.
`epdd serve` becomes `python -m epdd`: what starts the daemon is imported again in each worker, so it has to be that and
nothing else.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from epdd import __version__, hub, log
from epdd.errors import ConfigError, HubUnreachable, ModelError, StartupError
from epdd.settings import config
from epdd.settings.arguments import Parser, near
from epdd.settings.config import Config
from epdd.settings.workers import ModelSettings

USAGE = 2
EPDCTL = ("status", "policy", "explain", "topology", "drain", "resume", "restart", "chat")

HELP = """\
usage: epdd VERB ...

Serve vision-language models from this machine.

  epdd serve [MODEL] [options]   start the daemon; a model of the Hub is downloaded if it is not here
  epdd check MODEL [--json]      what a checkpoint is and whether it would be served; starts nothing
  epdd pull ID [--revision REV]  download a model of the Hub, or the rest of it
  epdd plan [--why] [options]    which workers would run where on this machine; starts nothing
  epdd --version                 the version

MODEL is a checkpoint's folder, or a model of the Hub as ORG/NAME.  `epdd VERB --help` lists a verb's options.
`epdctl` looks at the running daemon and steers it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    verb, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if verb in ("-V", "--version", "version"):
        print(f"epdd {__version__}")
        return 0
    try:
        if verb not in VERBS:
            raise ConfigError(f"no verb {verb}{_instead(verb)} (see epdd --help)")
        return VERBS[verb](arguments)
    except StartupError as error:
        print(f"epdd: {error.message}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) and verb != "serve" else error.exit_code
    except BrokenPipeError:
        # The reader, `head` say, has enough; the interpreter must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _instead(verb: str) -> str:
    if verb in EPDCTL:
        return f"; run epdctl {verb}"
    if verb.startswith("-"):
        return f"; options come after a verb, as in epdd serve {verb}"
    if "/" in verb or os.path.isdir(verb):
        return f"; did you mean epdd serve {verb}?"
    return near(verb, VERBS)


def _serve(arguments: list[str]) -> int:
    settings, args = config.load(arguments, prog="epdd serve")
    command = [sys.executable, "-m", "epdd", *arguments]
    if hub.is_id(settings.model.path) and not args.version:
        log.setup(settings.log.level)
        # Asked for by a person, it is downloaded; a service may only if its settings say so.
        found = hub.located(settings, download=settings.model.download or "NOTIFY_SOCKET" not in os.environ)
        command += ["--set", f"model.path={found.model.path}", "--set", f"model.name={found.model.name}"]
    log.output().close()
    # A Ctrl-C while the new interpreter starts would make it show a traceback: it waits for `epdd/__main__.py`.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.execv(sys.executable, command)


def _check(arguments: list[str]) -> int:
    parser = Parser(prog="epdd check", description="Say what a checkpoint is and whether it would be served, without "
                    "reading its weights or starting anything.  Exit code 0: served; 78: not.")
    _add_model(parser, "folder, or a model of the Hub that is in the local cache, as ORG/NAME")
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(arguments)
    from epdd.cli import check
    return check.run(args.model, _located(args), args.json)


def _pull(arguments: list[str]) -> int:
    parser = Parser(prog="epdd pull", description="Download what epdd needs of a model of the Hub into the local "
                    "cache, or the rest of it after an interruption.  HF_HOME, HF_ENDPOINT, "
                    "HF_TOKEN and HF_HUB_OFFLINE hold.")
    _add_model(parser, "model of the Hub, as ORG/NAME")
    args = parser.parse_args(arguments)
    if not hub.is_id(args.model):
        hub.refuse_missing(args.model)
        raise ModelError(f"{args.model} is a folder here already; epdd pull takes a model of the Hub as ORG/NAME")
    log.setup("info")
    from epdd.hub import cache, download
    try:
        folder = download.pull(args.model, args.revision)
    except (ModelError, HubUnreachable):
        here = cache.found(args.model, args.revision)
        if here is None:
            raise
        print(f"epdd: {args.model} is here already; the Hub does not say whether it has a newer one", file=sys.stderr)
        folder = here
    print(folder)
    return 0


def _plan(arguments: list[str]) -> int:
    from epdd.ctl import client, machine
    parser = Parser(prog="epdd plan", description="Show which workers would run where; starts nothing.")
    machine.plan_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        return machine.plan(args)
    except client.CtlError as error:
        raise ModelError(str(error)) from None


def _add_model(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("model", metavar="MODEL", help=text)
    parser.add_argument("--revision", default="", metavar="REV", help="branch, tag or commit (default: main)")


def _located(args: argparse.Namespace) -> str:
    """The model's folder.  Nothing is downloaded only to be looked at."""
    wanted = Config(model=ModelSettings(path=args.model, revision=args.revision))
    return hub.located(wanted, download=False).model.path


VERBS: dict[str, Callable[[list[str]], int]] = {"serve": _serve, "check": _check, "pull": _pull, "plan": _plan}
