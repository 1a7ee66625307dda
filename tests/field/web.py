"""A web server of images, in a thread of its own, with faults on request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.field.cases import pictures


class Host(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[str] = []           # request targets as they came
        self.hanging = 0                    # connections that are being kept waiting
        self.files = {"/circle.png": pictures.circle("blue"), "/page": b"<html>no image</html>"}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def hang(self, by: int) -> None:
        with self._lock:
            self.hanging += by


class _Handler(BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        self.server.seen.append(self.path)
        path = urlsplit(self.path)
        if path.path == "/hang":
            self.server.hang(1)
            self.connection.recv(1)         # until the client has enough
            self.server.hang(-1)
        elif path.path == "/to":
            self._answer(302, b"", Location=parse_qs(path.query)["url"][0])
        elif path.path.startswith("/status/"):
            self._answer(int(path.path[8:]), b"<html>no</html>")
        else:
            self._answer(200, self.server.files.get(path.path, pictures.circle("green")))

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def hosting() -> Iterator[Host]:
    with Host() as host:
        thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield host
        finally:
            host.shutdown()
            thread.join()
