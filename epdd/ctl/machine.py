"""`epdctl plan` and `epdctl topology`: this machine or a saved one, and which worker sits where on it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epdd.ctl import client

if TYPE_CHECKING:
    from epdd.hardware.topology import Topology
    from epdd.placement import Plan


def add_verbs(verbs: Any) -> None:
    verb = verbs.add_parser("plan", help="show which workers would run where; starts nothing, needs no daemon")
    plan_arguments(verb)
    verb.set_defaults(run=plan)

    verb = verbs.add_parser("topology", help="draw sockets, NUMA nodes, cores, memory, GPUs, and the workers on them")
    _add_settings(verb)
    verb.add_argument("--save", metavar="FILE", help="write the machine to a file, for --load or plan --topology")
    _add_machine(verb, "--load")
    verb.set_defaults(run=_topology)


def plan_arguments(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan`."""
    _add_settings(verb)
    verb.add_argument("--why", action="store_true", help="also print the reason for each decision")
    verb.add_argument("--json", action="store_true", help="print JSON")
    _add_machine(verb, "--topology")


def _add_settings(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--model", metavar="MODEL", help="folder of a checkpoint, or id of a model in the local cache")
    verb.add_argument("--config", metavar="FILE", help="settings file (default: that of the daemon)")
    verb.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                      help="set one setting, as in --set encoder.workers=2; may be repeated")


def _add_machine(verb: argparse.ArgumentParser, load: str) -> None:
    which = verb.add_mutually_exclusive_group()
    which.add_argument(load, dest="load", metavar="FILE", help="a machine saved by `epdctl topology --save`")
    which.add_argument("--sysroot", metavar="DIR", help="a copied machine: folder with its sys/ and proc/")


def plan(args: argparse.Namespace) -> int:
    """Print the placement.  Raises CtlError."""
    from msgspec import to_builtins

    from epdd import placement
    topology = _machine(args)
    decided = _decide(args, topology)
    print(json.dumps([asdict(spec) for spec in decided.specs], indent=2, default=to_builtins) if args.json
          else placement.explain(decided.specs, topology, decided.why if args.why else ()))
    return 0


def _topology(args: argparse.Namespace) -> int:
    from epdd.ctl import picture
    from epdd.errors import StartupError
    from epdd.hardware import saved
    topology = _machine(args)
    if args.save:
        try:
            saved.save(topology, Path(args.save))
        except StartupError as error:
            raise client.CtlError(error.message) from None
        print(f"saved to {args.save}")
        return 0
    workers = None if args.load or args.sysroot else _running(args)
    title = "workers as the daemon runs them"
    if workers is None:
        title = "workers as planned"
        try:
            workers = [picture.DrawnWorker(spec.name, spec.device, spec.cpus, spec.numa_node)
                       for spec in _decide(args, topology).specs]
        except client.CtlError as error:
            # An operator needs the picture most when no plan fits the machine.
            title, workers = f"no workers: {error}", []
    print(picture.draw(topology, workers, title, colour=picture.wants_colour(sys.stdout)))
    return 0


def _running(args: argparse.Namespace) -> list[Any] | None:
    """The running daemon's workers; None without one."""
    from epdd.ctl import picture
    try:
        workers = client.ask(client.socket_of(args.socket), "status")["workers"]
        return [picture.DrawnWorker(worker["name"], worker["device"], tuple(worker["cpus"] or ()), worker["numa_node"],
                                    worker["state"], tuple(worker.get("abilities") or ())) for worker in workers]
    except client.NotRunning:
        return None
    except KeyError as error:
        raise client.CtlError(f"the daemon's answer has no {error}; is it of another version?") from None


def _machine(args: argparse.Namespace) -> Topology:
    from epdd.errors import StartupError
    from epdd.hardware import saved
    from epdd.hardware.probe import probe
    try:
        return saved.load(Path(args.load)) if args.load else probe(args.sysroot or "/")
    except StartupError as error:
        raise client.ActionRefused(error) from None


def _decide(args: argparse.Namespace, topology: Topology) -> Plan:
    from epdd import checkpoint, emulation, families, hub, placement
    from epdd.settings import config
    from epdd.errors import StartupError
    argv = [f"--{name}={getattr(args, name)}" for name in ("config", "model") if getattr(args, name)]
    for item in args.set:
        argv += ["--set", item]
    try:
        settings = hub.located(config.load(argv)[0], download=False)
        found = checkpoint.look(settings.model.path or str(families.DEMO))
        emulated = emulation.load(settings.emulation, found.prompts.tokenizer)
        family = emulated.family(found.family) if emulated else found.family
        return placement.decide(topology, settings, family, placement.arena_bytes(settings, topology, family), emulated)
    except StartupError as error:
        raise client.ActionRefused(error) from None
