"""Checks that the daemon loses, confuses and leaks nothing under injected faults.

    python -m tools.soak --seconds 3600 --every 20
    python -m tools.soak --daemon-kills 100
    python -m tools.soak --seconds 1800 --hostile

The first asks the demo model questions with known answers and injects a fault every N seconds, chosen from a seed.
Each request must end once, with the right answer or a due error.  After every few faults the load pauses: each gauge
must be back at its start, and no process may have grown by more than 5 % since its warm-up.  Faults spare each worker
for a part of the time, so that growth can show.  The second kills the daemon under load: no process and no shared
memory may be left, and the next start must be clean.  The third injects no fault: eight honest clients ask alone and
beside hostile ones, in turns.  No honest request may be lost or answered wrongly, their p99 may at most double, memory
and descriptors must be back after each turn.  Exit code 1: a check failed.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

from tools.soak import faults, segments
from tools.soak.daemon import Json, Subject, all_gone, descriptors, resident_bytes, shared_files
from tools.soak.faults import Row
from tools.soak.load import BROKEN, CLIENTS, RIGHT, UNANSWERED, UNDUE, WRONG, Load, questions

QUIET_EVERY = 5         # faults between two quiet points
CHILDREN_GONE_S = 5.0
FDS_SLACK = 2           # a connection may still be closing
AT_REST_S = 60.0
WARM_UP_S = 600.0       # before the first rest, at most, and at most a sixth of the whole
WARM_S = 120.0          # a process is warm from its first rest after this time: about a thousand requests
GROWTH_MAX = 1.05       # memory of a process, over what it was when it was warm


async def soak(seconds: float, every: float, seed: int, hostile: bool) -> list[str]:
    """Returns the failures."""
    with tempfile.TemporaryDirectory(prefix="epdd-soak-") as folder:
        subject = Subject(Path(folder), *((segments.SETTINGS, segments.DESCRIPTORS) if hostile else ()))
        await subject.start()
        try:
            complaints = await (beside_hostiles(subject, seconds, seed) if hostile else
                                run(subject, seconds, every, seed))
            processes = await subject.processes()
            shared = shared_files(processes)
        finally:
            exit_code = await subject.stop()
        return complaints + await leavings(processes, shared) + ([f"exit code {exit_code}"] if exit_code else [])


async def leavings(processes: list[psutil.Process], shared: set[str]) -> list[str]:
    """Processes and shared memory that an ended daemon left."""
    alive = await all_gone(processes, CHILDREN_GONE_S)
    return [f"{one} runs {CHILDREN_GONE_S:.0f} s after its daemon" for one in alive] + [
        f"{path} is left" for path in sorted(shared) if Path(path).exists()]


async def beside_hostiles(subject: Subject, seconds: float, seed: int) -> list[str]:
    memory, rests = segments.Floors(), list[Rest]()

    async def rest(load: Load) -> None:
        rests.append(await quiet(subject, load, memory, rests[0] if rests else None))

    complaints = await segments.run(subject, seconds, seed, rest)
    return complaints + memory.grown(GROWTH_MAX)


async def run(subject: Subject, seconds: float, every: float, seed: int) -> list[str]:
    load, rows = Load(subject.url, seed), {name: Row() for name in faults.FAULTS}
    rng, memory = random.Random(f"soak faults {seed}"), Memory()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        unknown = await load.learn(session)
        print(f"{len(load.known)} questions, {unknown} more that the model answers wrong", flush=True)
        clients = [asyncio.create_task(load.client(session, number)) for number in range(CLIENTS)]
        try:
            load.resume()
            await asyncio.sleep(min(WARM_UP_S, seconds / 6))
            rest = await quiet(subject, load, memory, None)
            names = [worker["name"] for worker in (await subject.ask("status"))["workers"]]
            began, order = time.monotonic(), list[str]()
            while (passed := time.monotonic() - began) < seconds or order:      # finish the current round
                load.resume()
                await asyncio.sleep(every * (0.5 + rng.random() / 2))
                subject.spared = names[min(int(passed / seconds * len(names)), len(names) - 1)]
                order = order or rng.sample(list(rows), len(rows))      # each fault once before any comes again
                name = order.pop()
                await faults.inject(faults.FAULTS[name], subject, load, rng, rows[name])
                if sum(len(row.ready_s) for row in rows.values()) % QUIET_EVERY == 0:
                    rest = await quiet(subject, load, memory, rest)
            await asyncio.sleep(faults.GRACE_S)
            await quiet(subject, load, memory, rest)
            load.complaints += [f"a client of the soak ended: {client}" for client in clients if client.done()]
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
    if not load.outcomes[RIGHT]:
        load.complaints.append("nothing was answered")
    print(faults.table(rows))
    print(memory.told())
    print("requests:", ", ".join(f"{count} {name}" for name, count in sorted(load.outcomes.items())))
    print("errors:", ", ".join(f"{count} {code}" for code, count in sorted(load.codes.items())) or "none")
    return load.complaints


class Rest:
    """Gauges, descriptors and processes at rest, which must not change."""

    def __init__(self, subject: Subject, status: Json, processes: list[psutil.Process]) -> None:
        self.fds = descriptors(subject.pid)
        self.workers = {worker["name"]: descriptors(worker["pid"]) for worker in status["workers"]}
        self.pids = {"daemon": subject.pid, **{worker["name"]: worker["pid"] for worker in status["workers"]}}
        self.processes = len(processes)
        self.shared = shared_files(processes)
        self.zombies = sum(one.status() == psutil.STATUS_ZOMBIE for one in processes)

    def compare(self, now: "Rest") -> list[str]:
        found = []
        if now.fds > self.fds + FDS_SLACK:
            found.append(f"the daemon's descriptors grew from {self.fds} to {now.fds}")
        found += [f"descriptors of {name} grew from {self.workers[name]} to {count}"
                  for name, count in now.workers.items() if count > self.workers[name] + FDS_SLACK]
        if now.processes > self.processes or now.zombies > self.zombies:
            found.append(f"processes grew from {self.processes} to {now.processes}, {now.zombies} of them zombies")
        return found + [f"{path} is new in /dev/shm" for path in sorted(now.shared - self.shared)]


class Memory:
    """Each process's resident memory, compared with what it was when it was warm."""

    def __init__(self) -> None:
        self._warm: dict[int, tuple[str, int]] = {}
        self._growth: dict[int, tuple[float, float]] = {}       # greatest growth; age at the last reading

    def look(self, pids: dict[str, int]) -> list[str]:
        """Reads all processes at rest, by name; prints, and returns those that have grown too much."""
        told, found = [], []
        for name, pid in pids.items():
            size, age = resident_bytes(pid), time.time() - psutil.Process(pid).create_time()
            told.append(f"{name} {size / 1e6:.1f} MB")
            if pid not in self._warm and age >= WARM_S:
                self._warm[pid] = name, size
            elif pid in self._warm:
                growth = size / self._warm[pid][1]
                told[-1] += f" ({(growth - 1) * 100:+.1f} %)"
                self._growth[pid] = max(growth, self._growth.get(pid, (0.0, 0.0))[0]), age
                if growth > GROWTH_MAX:
                    found.append(f"{name} has {size / 1e6:.1f} MB, {(growth - 1) * 100:+.1f} % since it was warm")
        print(f"at rest; resident memory, and its growth since it was warm: {', '.join(told)}", flush=True)
        return found

    def told(self) -> str:
        """The longest-lived process of each name."""
        lines = []
        for name in sorted({name for name, _ in self._warm.values()}):
            of_name = [pid for pid, (other, _) in self._warm.items() if other == name and pid in self._growth]
            if of_name:
                pid = max(of_name, key=lambda pid: self._growth[pid][1])
                worst = max(self._growth[pid][0] for pid in of_name)
                most, age = self._growth[pid]
                lines.append(f"{name} {self._warm[pid][1] / 1e6:.1f} MB, in {age / 60:.0f} min at most "
                             f"{(most - 1) * 100:+.1f} % (worst of {len(of_name)} processes: "
                             f"{(worst - 1) * 100:+.1f} %)")
        return f"memory: {'; '.join(lines) or 'no process lived long enough'}"


async def quiet(subject: Subject, load: Load, memory: Memory | segments.Floors, rest: Rest | None) -> Rest:
    """Pause, and compare everything that could leak with the first time."""
    await load.pause()
    status = await subject.until(at_rest, AT_REST_S)
    now = Rest(subject, status, await subject.processes())
    load.complaints += memory.look(now.pids)
    if rest is None:
        return now
    load.complaints += rest.compare(now)
    return rest


def at_rest(status: Json) -> bool:
    return (status["state"] == "ready" and status["requests"]["running"] == 0 and status["router"]["queue_jobs"] == 0
            and status["router"]["i_cpu"] == 0 and status["arena"]["pinned_bytes"] == 0
            and status["arena"]["waiting"] == 0
            and all(worker["in_flight"] == 0 and worker["running"] == 0 and worker["waiting"] == 0
                    and not worker["kv_used"] for worker in status["workers"]))


async def kill_daemons(times: int, seed: int) -> list[str]:
    """Returns the failures."""
    complaints, gone_s, rng, known = list[str](), 0.0, random.Random(f"soak kills {seed}"), questions(seed)
    row = Row(fitting=(BROKEN,))
    with tempfile.TemporaryDirectory(prefix="epdd-soak-") as folder:
        subject = Subject(Path(folder))
        for number in range(times + 1):
            began = time.monotonic()
            await subject.start()
            if number:
                row.ready_s.append(time.monotonic() - began)
            if number == times:
                break
            load = Load(subject.url, seed + number, known)
            async with aiohttp.ClientSession() as session:
                clients = [asyncio.create_task(load.client(session, one)) for one in range(CLIENTS)]
                load.resume()
                await asyncio.sleep(rng.uniform(0.2, 1.5))
                processes = await subject.processes()
                shared = shared_files(processes)
                load.stop()
                row.flights += load.flights
                complaints += load.complaints           # errors from here on are due to the kill
                began = time.monotonic()
                await subject.kill()
                complaints += await leavings(processes, shared)
                gone_s = max(gone_s, time.monotonic() - began)
                await load.pause()                      # until each client has noticed
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)
        complaints += [f"exit code {code}"] if (code := await subject.stop()) else []
    print(faults.table({"`kill -9` of the daemon": row}))
    print(f"its processes were gone after {gone_s:.2f} s at most; an error here is a broken connection")
    return complaints + [f"{flight.outcome}: {flight.told}" for flight in row.flights
                         if flight.outcome in (WRONG, UNDUE, UNANSWERED)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds from one fault to the next, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hostile", action="store_true", help="hostile clients instead of faults")
    parser.add_argument("--daemon-kills", type=int, default=0, metavar="TIMES")
    args = parser.parse_args()
    complaints = asyncio.run(kill_daemons(args.daemon_kills, args.seed) if args.daemon_kills else
                             soak(args.seconds, args.every, args.seed, args.hostile))
    for complaint in complaints:
        print(f"wrong: {complaint}")
    print("nothing was lost" if not complaints else f"{len(complaints)} wrong")
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
