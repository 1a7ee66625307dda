"""Starts the real daemon as a user would, for tests: `with running(model=...) as daemon`."""

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, nullcontext
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_S = 400       # a hang: the import of torch and transformers has taken two minutes on a busy machine


class Daemon:
    def __init__(self, process, folder):
        self.process, self.folder = process, folder
        self.socket_path = folder / "admin.sock"
        self.port = None

    def ask(self, verb, **fields):
        """One request over the admin socket; raises OSError while there is none."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(str(self.socket_path))
            client.sendall(json.dumps({"verb": verb, **fields}).encode() + b"\n")
            answer = json.loads(client.makefile().readline())
        assert answer["ok"], answer
        return answer["result"]

    def status(self):
        return self.ask("status")

    def worker(self, name):
        return next(worker for worker in self.status()["workers"] if worker["name"] == name)

    def wait(self, condition, seconds=START_S):
        """Poll until `condition(status)` holds; shows the log if it does not."""
        end, last = time.monotonic() + seconds, None
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.process.returncode}:\n{self.log()}")
            try:
                last = self.status()
                if condition(last):
                    return last
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not true after {seconds} s: {last}\n{self.log()}")

    def listening(self):
        """Wait until the API answers; workers may still be loading."""
        self.port = self.wait(lambda status: status["listen"]["port"])["listen"]["port"]
        return self

    def ready(self):
        self.wait(lambda status: status["state"] == "ready")
        return self

    @contextmanager
    def healing(self):
        """Around a fault and its effects; prints the seconds until all workers are READY again."""
        began = time.monotonic()
        yield
        self.ready()
        print(f"READY again after {time.monotonic() - began:.1f} s")

    def at_rest(self):
        """Wait until nothing runs; returns the numbers that must be back at their start."""
        idle = self.wait(lambda s: s["requests"]["running"] == 0 and s["router"]["queue_jobs"] == 0 and all(
            w["in_flight"] == 0 and w["running"] == 0 and w["waiting"] == 0 and not w["kv_used"]
            for w in s["workers"]))
        return {"pinned": idle["arena"]["pinned_bytes"], "waiting": idle["arena"]["waiting"],
                "i_cpu": idle["router"]["i_cpu"], "fds": len(os.listdir(f"/proc/{self.process.pid}/fd")),
                "worker_fds": [len(os.listdir(f"/proc/{w['pid']}/fd")) for w in idle["workers"]],
                "pids": [w["pid"] for w in idle["workers"]]}

    def chat(self, content, **fields):
        """The answer's whole body; raises on any other status than 200."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0, **fields}
        status, answer = self.post(body)
        assert status == 200, answer
        return answer

    def post(self, body, path="/v1/chat/completions"):
        """(status, parsed body) of a JSON request; `body` may be bytes sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request(urllib.request.Request(self.url(path), data, {"Content-Type": "application/json"}))

    def get(self, path):
        return self.request(urllib.request.Request(self.url(path)))

    def url(self, path):
        return f"http://127.0.0.1:{self.port}{path}"

    def request(self, request):
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, json.loads(text) if text.startswith("{") else text

    def say(self, content, **fields):
        return self.chat(content, **fields)["choices"][0]["message"]["content"]

    def log(self):
        return (self.folder / "log").read_text()[-8000:]


@contextmanager
def running(model=None, folder=None, program="epdd", **settings):
    """A daemon on a free port with its own admin socket, in `folder` if one is given; `settings` as section__key=value.

    It may be killed meanwhile.  `program`: the module that is run.
    """
    with nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="epdd-test-") as folder:
        folder = Path(folder)
        command = [sys.executable, "-m", program, "--port", "0", "--set", f"admin.socket={folder}/admin.sock",
                   "--set", "arena.bytes=0x4000000", "--set", "pd.kv_tokens=16384"]
        if model:
            command += ["--model", str(model)]
        for name, value in settings.items():
            command += ["--set", f"{name.replace('__', '.')}={value}"]
        with open(folder / "log", "w") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        daemon = Daemon(process, folder)
        try:
            yield daemon.listening()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    raise AssertionError(f"the daemon did not stop:\n{daemon.log()}") from None


def data_url(image, form="PNG"):
    """A Pillow image, or the bytes of a file, as a data: URL."""
    if not isinstance(image, bytes):
        buffer = io.BytesIO()
        image.save(buffer, form)
        image = buffer.getvalue()
    return f"data:image/{form.lower()};base64,{base64.b64encode(image).decode()}"


def image_part(image, form="PNG"):
    return {"type": "image_url", "image_url": {"url": data_url(image, form)}}


def text_part(text):
    return {"type": "text", "text": text}
