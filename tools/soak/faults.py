"""The soak's faults: a plan made from a seed, each injected and waited for until all workers are READY again."""

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tools.soak.daemon import SETTINGS, Json, Subject
from tools.soak.load import FITS, LEFT, REFUSED, RIGHT, Flight, Load

PAUSE_S = 1.5           # how long a short stop or a drain lasts
READY_S = 300.0         # seconds, generous for a slow machine
GRACE_S = 1.0           # seconds after READY in which a due error may still arrive

Fault = Callable[[Subject, random.Random], Awaitable[Callable[[Json], bool]]]


@dataclass
class Row:
    """All faults of a kind."""

    flights: list[Flight] = field(default_factory=list)     # in flight when one came
    ready_s: list[float] = field(default_factory=list)
    fitting: tuple[str, ...] = (FITS,)                      # due errors and losses

    def cells(self) -> list[str]:
        ended = [flight.outcome for flight in self.flights]
        due = sum(outcome in (RIGHT, REFUSED, LEFT) for outcome in ended)
        error = sum(outcome in self.fitting for outcome in ended)
        return [str(count) for count in (len(self.ready_s), len(ended), due, error, len(ended) - due - error)] + [
            f"{statistics.median(self.ready_s):.2f}", f"{max(self.ready_s):.2f}"]


async def _worker(subject: Subject, rng: random.Random) -> Json:
    """The worker to hit."""
    workers = (await subject.ask("status"))["workers"]
    return dict(rng.choice([worker for worker in workers if worker["name"] != subject.spared]))


def _other(worker: Json) -> Callable[[Json], bool]:
    """Wait for the worker's new process."""
    return lambda status: all(one["pid"] != worker["pid"] for one in status["workers"])


def _any(status: Json) -> bool:
    return True


async def kill(subject: Subject, rng: random.Random) -> Callable[[Json], bool]:
    worker = await _worker(subject, rng)
    os.kill(worker["pid"], signal.SIGKILL)
    return _other(worker)


async def freeze(subject: Subject, rng: random.Random) -> Callable[[Json], bool]:
    worker = await _worker(subject, rng)
    os.kill(worker["pid"], signal.SIGSTOP)
    await asyncio.sleep(PAUSE_S)
    os.kill(worker["pid"], signal.SIGCONT)
    return _any


async def freeze_daemon(subject: Subject, rng: random.Random) -> Callable[[Json], bool]:
    """It must not count its own pause as its workers' silence."""
    before = {worker["pid"] for worker in (await subject.ask("status"))["workers"]}
    subject.signal(signal.SIGSTOP)
    await asyncio.sleep(PAUSE_S * 2)
    subject.signal(signal.SIGCONT)
    return lambda status: {worker["pid"] for worker in status["workers"]} == before


async def hang(subject: Subject, rng: random.Random) -> Callable[[Json], bool]:
    worker = await _worker(subject, rng)
    os.kill(worker["pid"], signal.SIGSTOP)
    return _other(worker)


async def restart(subject: Subject, rng: random.Random) -> Callable[[Json], bool]:
    worker = await _worker(subject, rng)
    await subject.ask("restart", worker=worker["name"])
    return _other(worker)


async def drain(subject: Subject, rng: random.Random) -> Callable[[Json], bool]:
    worker = await _worker(subject, rng)
    await subject.ask("drain", worker=worker["name"])
    await asyncio.sleep(PAUSE_S)
    await subject.ask("resume", worker=worker["name"])
    return _any


async def kill_fork_server(subject: Subject, rng: random.Random) -> Callable[[Json], bool]:
    """This has no effect until the next worker dies."""
    if server := subject.fork_server():
        server.kill()
    return await kill(subject, rng)


async def reload(subject: Subject, rng: random.Random) -> Callable[[Json], bool]:
    policy = rng.choice(["earliest", "budget"])
    subject.settings.write_text(SETTINGS.replace("earliest", policy))
    subject.signal(signal.SIGHUP)
    return lambda status: status["router"]["policy"] == policy


async def broken_reload(subject: Subject, rng: random.Random) -> Callable[[Json], bool]:
    before = (await subject.ask("status"))["router"]["policy"]
    subject.settings.write_text(rng.choice(["[router", "[router]\npolicy = 7\n", "[nothing]\nx = 1\n"]))
    subject.signal(signal.SIGHUP)
    await asyncio.sleep(PAUSE_S)
    subject.settings.write_text(SETTINGS)
    return lambda status: status["router"]["policy"] == before


async def policy(subject: Subject, rng: random.Random) -> Callable[[Json], bool]:
    wanted = rng.choice(["budget", "least-loaded", "round-robin", "earliest"])
    await subject.ask("policy", policy=wanted)
    return lambda status: status["router"]["policy"] == wanted


FAULTS: dict[str, Fault] = {
    "`kill -9` of a worker": kill, "a worker is stopped for 1.5 s": freeze, "a worker is stopped for good": hang,
    "`kill -9` of fork server and a worker": kill_fork_server, "the daemon is stopped for 3 s": freeze_daemon,
    "`epdctl restart`": restart, "`epdctl drain`, then `resume`": drain, "`epdctl policy`": policy,
    "SIGHUP": reload, "SIGHUP with a broken file": broken_reload}


async def inject(fault: Fault, subject: Subject, load: Load, rng: random.Random, row: Row) -> None:
    """Inject one fault, and wait until all workers are ready."""
    load.troubled = float("inf")
    row.flights += load.flights
    began = time.monotonic()
    healed = await fault(subject, rng)
    await subject.until(lambda status: status["state"] == "ready" and healed(status), READY_S)
    row.ready_s.append(time.monotonic() - began)
    load.troubled = time.monotonic() + GRACE_S


def table(rows: dict[str, Row]) -> str:
    """In Markdown; requests in flight at the fault, and seconds until all workers are READY."""
    lines = [["fault", "times", "requests", "as due", "fitting error", "lost", "READY s", "worst"],
             *([name, *row.cells()] for name, row in sorted(rows.items()) if row.ready_s)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])} |"
                     for line in lines)
