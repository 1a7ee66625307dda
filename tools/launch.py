"""Servers as children of a benchmark: on a free port, with their log kept, ended by process id.

    with launch.Daemon("--model", folder, settings=["pd.max_sequences=8"]) as daemon:
        daemon.ready()
        ask(daemon.url)

`Daemon` is epdd; `Server` is any other program.  If the benchmark ends, its servers end too.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from epdd.ctl import client

ROOT = Path(__file__).resolve().parents[1]
START_S = 600.0             # a large checkpoint on a slow disk
STOP_S = 60.0
LOG_LETTERS = 4000          # of the log's end, shown if a server fails


class Server:
    """A program that serves until it is stopped."""

    def __init__(self, command: Sequence[str], url: str = "", cpus: str = "") -> None:
        """`cpus`: CPUs that it may use, like "0-3,8"; empty: those of this program."""
        self._folder = tempfile.TemporaryDirectory(prefix="epdd-tools-")
        self.folder = Path(self._folder.name)
        self.command = [*(["taskset", "-c", cpus] if cpus else []), *command]
        self.url = url

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def chat_url(self) -> str:
        return f"{self.url}/v1/chat/completions"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> None:
        """Returns at once.  Call it in the main thread."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with open(self.folder / "log", "w") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT)

    def until(self, condition: Callable[[], bool], limit_s: float = START_S, every_s: float = 0.05) -> float:
        """Seconds until the condition holds; it may raise OSError or CtlError before.  Ends the program if the server
        ends first or the limit passes."""
        began = time.monotonic()
        while self.process.poll() is None and time.monotonic() < began + limit_s:
            try:
                if condition():
                    return time.monotonic() - began
            except (OSError, client.CtlError):
                pass
            time.sleep(every_s)
        state = "takes too long" if self.process.poll() is None else f"ended with {self.process.returncode}"
        raise SystemExit(f"{Path(self.command[0]).name} {state}:\n{self.log[-LOG_LETTERS:]}")

    def ready(self) -> float:
        """Seconds until it answers /health."""
        def healthy() -> bool:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        return self.until(healthy)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()         # epdd's workers end with their daemon
            code = self.process.wait()
        if code not in (0, -signal.SIGTERM):
            print(f"the server ended with {code}:\n{self.log[-LOG_LETTERS:]}", file=sys.stderr)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            self.stop()
        finally:
            self._folder.cleanup()


class Daemon(Server):
    """epdd with these arguments and settings ("section.key=value"), on a free port."""

    def __init__(self, *arguments: str, settings: Iterable[str] = (), cpus: str = "",
                 program: Sequence[str] = ("-m", "epdd")) -> None:
        super().__init__([], cpus=cpus)
        self.socket = self.folder / "admin.sock"
        self.command += [sys.executable, *program, "--port", "0", *arguments]
        for setting in (f"admin.socket={self.socket}", "log.level=warning", *settings):
            self.command += ["--set", setting]

    def ask(self, verb: str, **fields: Any) -> Any:
        """One request over the admin socket.  Raises CtlError if no daemon listens."""
        return client.ask(self.socket, verb, **fields)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.ask("status")
        return status

    def ready(self, seen: Callable[[dict[str, Any]], None] = lambda status: None, every_s: float = 0.05) -> float:
        """Seconds until it is ready to serve and `url` is known; `seen` gets each status until then."""
        def is_ready() -> bool:
            status = self.status()
            seen(status)
            self.url = f"http://{status['listen']['host']}:{status['listen']['port']}"
            return bool(status["state"] == "ready")
        return self.until(is_ready, every_s=every_s)


def free_port() -> int:
    """A free port, for servers that cannot choose one themselves."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
