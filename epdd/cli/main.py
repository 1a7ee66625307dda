"""`epdd`: serve, check, download a model, or plan its workers.

Exit codes: 0 success; 2 wrong usage; 75 temporary failure, a retry may help; 78 a setting, the model or the machine
does not fit, a retry cannot help; 130 Ctrl-C.  `epdd serve` replaces itself by `python -m epdd`, because each worker
imports the main module again and must not import more than that.
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

  epdd serve [MODEL] [options]   start the daemon; downloads a model of the Hub that is not in the local cache
  epdd check MODEL [--json]      show what a checkpoint is and whether epdd can serve it; starts nothing
  epdd pull ID [--revision REV]  download a model of the Hub; continues an interrupted download
  epdd plan [--why] [options]    show which workers would run where on this machine; starts nothing
  epdd --version                 print the version

MODEL is the folder of a checkpoint, or the id of a model of the Hugging Face Hub as ORG/NAME. `epdd VERB --help` lists
the options of a verb. `epdctl` shows and controls a running daemon.
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
        # The reader of stdout, `head` for example, has closed it.  Python must not complain when it flushes at exit.
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
        # A person at a terminal wants the download.  Under systemd it needs model.download = true.
        found = hub.located(settings, download=settings.model.download or "NOTIFY_SOCKET" not in os.environ)
        command += ["--set", f"model.path={found.model.path}", "--set", f"model.name={found.model.name}"]
    log.output().close()
    # Ctrl-C while the new interpreter starts would print a traceback: blocked until `epdd/__main__.py` runs.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.execv(sys.executable, command)


def _check(arguments: list[str]) -> int:
    parser = Parser(prog="epdd check", description="Show what a checkpoint is and whether epdd can serve it. Reads no "
                    "weights and starts nothing. Exit code 0: it can be served; 78: it cannot.")
    _add_model(parser, "folder of the checkpoint, or id of a model in the local cache of the Hub as ORG/NAME")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    from epdd.cli import check
    return check.run(args.model, _located(args), args.json)


def _pull(arguments: list[str]) -> int:
    parser = Parser(prog="epdd pull", description="Download what epdd needs of a model of the Hugging Face Hub into "
                    "the local cache. Continues an interrupted download. HF_HOME, HF_ENDPOINT, HF_TOKEN and "
                    "HF_HUB_OFFLINE in the environment apply.")
    _add_model(parser, "id of the model on the Hub, as ORG/NAME")
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
    parser = Parser(prog="epdd plan", description="Show which workers would run where on this machine. Starts nothing.")
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
    """The model's folder.  Downloads nothing."""
    wanted = Config(model=ModelSettings(path=args.model, revision=args.revision))
    return hub.located(wanted, download=False).model.path


VERBS: dict[str, Callable[[list[str]], int]] = {"serve": _serve, "check": _check, "pull": _pull, "plan": _plan}
