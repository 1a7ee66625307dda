"""Honest clients alone and beside hostile ones, in turns on one daemon: lost requests and latency."""

import asyncio
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tools.soak.daemon import Subject, resident_bytes
from tools.soak.load import BROKEN, CLIENTS, RIGHT, UNANSWERED, UNDUE, WRONG, Load

KEYS = "sk-honest", "sk-hostile"
SETTINGS = (f"server.api_keys={','.join(KEYS)}",)
DESCRIPTORS = 1_024         # descriptors of the daemon, so that silent connections reach the limit
SEGMENT_S = 30.0            # seconds at most; short, so that both kinds meet the same other load
PAIRS_MIN = 2               # of segments
SLOWER_MAX = 2.0            # p99 beside hostile clients, against without
ENOUGH = 1_000              # right answers of each kind that a p99 needs
LOOK_S = 2.0                # seconds between two checks of the admin socket and /health
ASKED_S = 10.0              # seconds in which these must answer
RESTS_MIN = 5               # memory readings of each third of a run that a comparison needs
GRACE_S = 200.0             # seconds after their time in which hostile clients must have left


class Hostiles:
    """The process of the hostile clients, and its results."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self._port = port
        self.seen: dict[str, Counter[str]] = {}
        self.complaints: list[str] = []

    async def attack(self, seconds: float) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"port": self._port, "key": KEYS[1], "seconds": seconds}).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), seconds + GRACE_S)
        if not line:
            sys.exit("the hostile clients' process ended")
        told = json.loads(line)
        for act, ends in told["seen"].items():
            self.seen.setdefault(act, Counter()).update(ends)
        self.complaints += told["complaints"]

    def table(self) -> str:
        lines = [f"| {act} | {sum(ends.values())} | {', '.join(f'{n} {end}' for end, n in sorted(ends.items()))} |"
                 for act, ends in sorted(self.seen.items())]
        return "\n".join(["| hostile act | times | ended |", "|---|--:|---|", *lines])


class Floors:
    """Each process's resident memory at rest, of which the lowest counts.

    Large bodies leave megabytes of garbage until the collector runs, so single readings differ by more than a leak of
    minutes.  A leak raises the lowest readings too.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, int], list[int]] = {}

    def look(self, pids: dict[str, int]) -> list[str]:
        """Reads all processes at rest, by name, and prints them."""
        for process in pids.items():
            self._sizes.setdefault(process, []).append(resident_bytes(process[1]))
        print("at rest; resident memory:", ", ".join(f"{name} {self._sizes[name, pid][-1] / 1e6:.1f} MB"
                                                     for name, pid in pids.items()), flush=True)
        return []

    def grown(self, most: float) -> list[str]:
        """Prints the lowest of each third; returns processes whose last is over `most` times the middle one."""
        found = []
        for (name, _), sizes in self._sizes.items():
            third = len(sizes) // 3
            if third < RESTS_MIN:
                continue
            first, middle, last = (min(sizes[begin:begin + third]) for begin in (0, third, len(sizes) - third))
            told = (f"{name}: lowest {first / 1e6:.1f} MB in the first third, {middle / 1e6:.1f} in the second, "
                    f"{last / 1e6:.1f} in the last ({(last / middle - 1) * 100:+.1f} %)")
            print(told)
            found += [told] if last > most * middle else []
        return found


@asynccontextmanager
async def hostile_clients(port: int) -> AsyncIterator[Hostiles]:
    """Their process, idle until an attack."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tools.soak.hostile", stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, limit=1 << 24)
    try:
        yield Hostiles(process, port)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def run(subject: Subject, seconds: float, seed: int, rest: Callable[[Load], Awaitable[None]]) -> list[str]:
    """Returns the failures.  `rest` pauses the load and adds what differs from the first time."""
    load, pairs = Load(subject.url, seed), max(PAIRS_MIN, round(seconds / SEGMENT_S / 2))
    took: dict[bool, list[float]] = {False: [], True: []}
    restarts = await _restarts(subject)
    async with (aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0),
                                      headers={"Authorization": f"Bearer {KEYS[0]}"}) as session,
                hostile_clients(subject.port) as hostiles):
        await load.learn(session)
        clients = [asyncio.create_task(load.client(session, number)) for number in range(CLIENTS)]
        try:
            load.resume()
            await hostiles.attack(1.0)          # after all kinds of request, memory has its size
            await rest(load)
            for number in range(2 * pairs):
                beside = bool(number % 2)
                load.seconds = took[beside]
                load.resume()
                if beside:
                    await _watched(subject, load, session, hostiles.attack(seconds / pairs / 2))
                else:
                    await asyncio.sleep(seconds / pairs / 2)
                await rest(load)
            load.complaints += [f"a client of the soak ended: {client}" for client in clients if client.done()]
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
    if await _restarts(subject) != restarts:
        load.complaints.append("a worker was lost")
    print(hostiles.table())
    return _distinct(load.complaints + hostiles.complaints) + _told(load, took)


async def _watched(subject: Subject, load: Load, session: aiohttp.ClientSession, attack: Awaitable[None]) -> None:
    """Run the attack; meanwhile `epdctl status` and /health must be answered."""
    attacking = asyncio.ensure_future(attack)
    while not attacking.done():
        try:
            await asyncio.wait_for(subject.ask("status"), ASKED_S)
        except (OSError, ValueError) as error:
            load.complaints.append(f"epdctl had no answer: {error!r}")
        try:
            async with asyncio.timeout(ASKED_S), session.get(f"http://127.0.0.1:{subject.port}/health") as answer:
                if answer.status != 200:
                    load.complaints.append(f"/health said {answer.status}")
        except (aiohttp.ClientError, TimeoutError) as error:
            load.complaints.append(f"/health had no answer: {error!r}")
        await asyncio.wait({attacking}, timeout=LOOK_S)
    await attacking


async def _restarts(subject: Subject) -> int:
    return sum(worker["restarts"] for worker in (await subject.ask("status"))["workers"])


def _told(load: Load, took: dict[bool, list[float]]) -> list[str]:
    """Prints the sums; adds a failure if honest clients' p99 is over the limit."""
    lost = sum(load.outcomes[outcome] for outcome in (BROKEN, UNDUE, UNANSWERED))
    print("honest requests:", ", ".join(f"{count} {name}" for name, count in sorted(load.outcomes.items())))
    print(f"lost {lost}, wrong {load.outcomes[WRONG]}")
    if not load.outcomes[RIGHT] or min(map(len, took.values())) < 2:
        return ["too little was answered"]
    halves, tails = {}, {}
    for beside, seconds in took.items():
        cuts: list[Any] = statistics.quantiles(seconds, n=100, method="inclusive")
        halves[beside], tails[beside] = cuts[49], cuts[98]
        print(f"{'beside hostile clients' if beside else 'alone'}: {len(seconds)} right answers, "
              f"p50 {cuts[49] * 1e3:.0f} ms, p99 {cuts[98] * 1e3:.0f} ms")
    print(f"p50 x {halves[True] / halves[False]:.2f}, p99 x {tails[True] / tails[False]:.2f}")
    if tails[True] > SLOWER_MAX * tails[False] and min(map(len, took.values())) >= ENOUGH:
        return [f"honest p99 is {tails[True] / tails[False]:.2f} times that without hostile clients"]
    return []


def _distinct(complaints: list[str]) -> list[str]:
    """Each once, without the time that it took."""
    counts = Counter(re.sub(r"^after [\d.]+ s: ", "", complaint) for complaint in complaints)
    return [f"{complaint} ({count} times)" for complaint, count in sorted(counts.items())]
