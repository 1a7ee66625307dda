"""Answers the admin protocol without a daemon: `python -m tests.ctl.fake_daemon PATH` to look at `--watch`."""

from __future__ import annotations

import contextlib
import json
import math
import socketserver
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.ctl.snapshot import snapshot


class FakeDaemon(socketserver.ThreadingUnixStreamServer):
    """Replies with `answers[verb]`, a value or an exception's text; records the requests."""

    daemon_threads = True

    def __init__(self, path: Path, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[dict[str, Any]] = []
        super().__init__(str(path), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        super().__exit__(*args)


class _Handler(socketserver.StreamRequestHandler):
    server: FakeDaemon

    def handle(self) -> None:
        for line in self.rfile:
            request = json.loads(line)
            self.server.asked.append(request)
            answer = self.server.answers.get(request["verb"])
            if callable(answer):
                answer = answer()
            reply = {"ok": True, "result": answer}
            if isinstance(answer, Exception):
                reply = {"ok": False, "code": "invalid_request", "error": str(answer)}
            with contextlib.suppress(BrokenPipeError):      # the client gave up waiting
                self.wfile.write(json.dumps(reply).encode() + b"\n")


def moving() -> dict[str, Any]:
    """A snapshot whose bars move."""
    now = snapshot()
    wave = 0.5 + 0.5 * math.sin(time.time() / 3)
    now["arena"]["used_bytes"] = int(wave * now["arena"]["bytes"])
    for worker in now["workers"]:
        if worker["kv_tokens"]:
            worker["kv_used"] = int(wave * worker["kv_tokens"])
    return now


if __name__ == "__main__":
    with FakeDaemon(Path(sys.argv[1]), {"status": moving}):
        time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 3600)
