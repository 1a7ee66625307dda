"""The daemon under test: started like a user's, queried over its admin socket and through /proc."""

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
STOP_S = 60.0
SETTINGS = """\
[router]
policy = "earliest"

[fleet]
# Faults come faster here than in life, and none of them comes of the work.
min_uptime_s = 1.0
stall_s = 5.0
poison_s = 5.0
"""

Json = dict[str, Any]


class Subject:
    """One daemon with two encoders on the demo model."""

    def __init__(self, folder: Path, settings: Sequence[str] = (), descriptors: int = 0) -> None:
        """`settings`: additional `section.key=value` ones.  `descriptors`: the daemon's limit; 0: this program's."""
        self._more = [part for setting in settings for part in ("--set", setting)]
        self._descriptors = descriptors
        self.settings = folder / "epdd.toml"
        self.settings.write_text(SETTINGS)
        self._admin = folder / "admin.sock"
        self._log = folder / "log"
        self.url = ""
        self.spared = ""        # a worker that faults spare

    async def start(self) -> None:
        """Start, and wait until it is ready."""
        command = [sys.executable, "-m", "epdd", "--port", "0", "--config", str(self.settings),
                   "--set", f"admin.socket={self._admin}", "--set", "encoder.workers=2", "--set", "pd.kv_tokens=16384",
                   "--set", "arena.bytes=0x1000000", "--set", "arena.cache_bytes=0x400000", *self._more]
        with open(self._log, "a") as log:
            self._process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=log, stderr=log)
        self.pid = self._process.pid
        status = await self.until(lambda status: status["state"] == "ready")
        if self._descriptors:
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (self._descriptors, self._descriptors))
        self.port = status["listen"]["port"]
        self.url = f"http://127.0.0.1:{self.port}/v1/chat/completions"

    async def stop(self) -> int:
        """The exit code."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self._process.wait(), STOP_S)

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ask(self, verb: str, **fields: Any) -> Any:
        """Raises OSError if no daemon listens, ValueError if the verb is refused."""
        reader, writer = await asyncio.open_unix_connection(str(self._admin), limit=1 << 24)
        try:
            writer.write(json.dumps({"verb": verb, **fields}).encode() + b"\n")
            answer = json.loads(await asyncio.wait_for(reader.readline(), 10.0))
        finally:
            writer.close()
        if not answer["ok"]:
            raise ValueError(answer["error"])
        return answer["result"]

    async def until(self, condition: Callable[[Json], bool], limit_s: float = START_S) -> Json:
        """The first status for which `condition` holds.  Ends the daemon and the program if there is none."""
        end, status = time.monotonic() + limit_s, None
        while time.monotonic() < end and self._process.returncode is None:
            try:
                status = await self.ask("status")
                if condition(status):
                    return dict(status)
            except OSError:
                pass
            await asyncio.sleep(0.05)
        code = self._process.returncode
        if code is None:
            self._process.kill()
        sys.exit(f"exit code {code}, not true after {limit_s:.0f} s: {status}\n{self.log()}")

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    async def processes(self) -> list[psutil.Process]:
        """The daemon, its descendants, and workers whose fork server was killed."""
        daemon = psutil.Process(self.pid)
        workers = [psutil.Process(worker["pid"]) for worker in (await self.ask("status"))["workers"] if worker["pid"]]
        return list({daemon, *daemon.children(recursive=True), *workers})

    def fork_server(self) -> psutil.Process | None:
        return next((one for one in psutil.Process(self.pid).children() if "forkserver" in " ".join(one.cmdline())),
                    None)


def resident_bytes(pid: int) -> int:
    """Resident memory without the arena, whose size is fixed."""
    with open(f"/proc/{pid}/status") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(("RssAnon:", "RssFile:")))


def descriptors(pid: int) -> int:
    """Open files, without idle client connections."""
    kept = [each for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED]
    return len(os.listdir(f"/proc/{pid}/fd")) - len(kept)


async def all_gone(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Processes that still run after the limit, without zombies."""
    end = time.monotonic() + limit_s
    while left := [one for one in processes if _runs(one)]:
        if time.monotonic() > end:
            break
        await asyncio.sleep(0.02)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def shared_files(processes: list[psutil.Process]) -> set[str]:
    """Files in /dev/shm that these processes have mapped."""
    found = set()
    for one in processes:
        with suppress(OSError):         # it ended meanwhile
            lines = Path(f"/proc/{one.pid}/maps").read_text().splitlines()
            found |= {line[line.index("/dev/shm/"):] for line in lines if "/dev/shm/" in line}
    return found
