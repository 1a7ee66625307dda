"""Servers that tests put in front of the daemon: started on loopback, waited for, and ended."""

import os
import socket
import subprocess
import time
from contextlib import contextmanager

START_S = 120


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def started(command, port, folder, environment=None):
    """The server of `command` from when it takes connections on `port`; its output lies in `folder`."""
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(list(map(str, command)), cwd=folder, stdin=subprocess.DEVNULL, stdout=log,
                                   stderr=log, env=environment or os.environ)
    try:
        end = time.monotonic() + START_S
        while not _listens(port):
            assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()[-4000:]
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
