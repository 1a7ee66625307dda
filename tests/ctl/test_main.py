import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from epdd.ctl import client
from epdd.ctl.main import main
from tests.ctl.fake_daemon import FakeDaemon
from tests.ctl.snapshot import snapshot


@pytest.fixture
def daemon(tmp_path):
    with FakeDaemon(tmp_path / "admin-8765.sock", {"status": snapshot(), "version": "0.1.0"}) as made:
        yield made


def epdctl(daemon, *argv):
    return main(["--socket", daemon.server_address, *argv])


def test_status(daemon, capsys):
    assert epdctl(daemon, "status") == 1        # degraded
    out = capsys.readouterr().out
    assert re.search(r"encoder/1 +cpu +0 +4-15 +READY", out)
    assert "\x1b" not in out
    daemon.answers["status"] = snapshot(state="ready", why=[])
    assert epdctl(daemon, "status") == 0


def test_status_for_programs(daemon, capsys):
    assert epdctl(daemon, "status", "--json") == 1
    assert json.loads(capsys.readouterr().out) == snapshot()


def test_status_of_another_version(daemon, capsys):
    daemon.answers["status"] = {"state": "ready"}
    assert epdctl(daemon, "status") == 1
    assert "another version" in capsys.readouterr().err


@pytest.mark.parametrize("verb, state, code, line", [
    ("drain", "DRAINING", 0, "encoder/0 DRAINING"), ("drain", "STARTING", 1, "cannot drain encoder/0: it is STARTING"),
    ("resume", "READY", 0, "encoder/0 READY"), ("resume", "GONE", 1, "cannot resume encoder/0: it is GONE"),
    ("restart", "READY", 0, "encoder/0 restarts")])
def test_steering(daemon, capsys, verb, state, code, line):
    daemon.answers[verb] = state
    assert epdctl(daemon, verb, "encoder/0") == code
    assert daemon.asked[-1] == {"verb": verb, "worker": "encoder/0"}
    captured = capsys.readouterr()
    assert (captured.out + captured.err).removeprefix("epdctl: ") == line + "\n"


def test_refused(daemon, capsys):
    daemon.answers["drain"] = ValueError("no worker encoder/9; there are encoder/0, pd/0")
    assert epdctl(daemon, "drain", "encoder/9") == 1
    assert capsys.readouterr().err == "epdctl: no worker encoder/9; there are encoder/0, pd/0\n"


def test_version(daemon, capsys, tmp_path):
    assert epdctl(daemon, "version") == 0
    assert capsys.readouterr().out.splitlines()[1] == "epdd 0.1.0"
    assert main(["--socket", str(tmp_path / "none.sock"), "version"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "epdd not running"


def test_no_daemon(tmp_path, capsys):
    assert main(["--socket", str(tmp_path / "none.sock"), "status"]) == 3
    assert "daemon not running" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["nothing"], ["drain"], ["chat"]])
def test_usage(argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2


def test_the_only_live_socket_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(client, "SYSTEM_DIR", tmp_path / "system")
    environ = {"RUNTIME_DIRECTORY": str(tmp_path / "own")}
    (tmp_path / "own").mkdir()
    (tmp_path / "system").mkdir()
    with pytest.raises(client.NotRunning):
        client.find_socket(environ)
    with FakeDaemon(tmp_path / "own" / "admin-1.sock", {}):
        pass                                    # gone, its socket file stays
    with FakeDaemon(tmp_path / "system" / "admin-2.sock", {}):
        assert client.find_socket(environ) == tmp_path / "system" / "admin-2.sock"
        with FakeDaemon(tmp_path / "own" / "admin-3.sock", {}):
            with pytest.raises(client.UsageError, match="(?s)several.*own/admin-3.sock.*system/admin-2.sock"):
                client.find_socket(environ)
            assert client.find_socket(environ | {"EPDD_ADMIN_SOCKET": "/a/b"}).name == "b"
            for name, value in environ.items():
                monkeypatch.setenv(name, value)
            assert main(["status"]) == 2


def test_a_daemon_that_hangs(daemon, monkeypatch, capsys):
    monkeypatch.setattr(client, "ANSWER_S", 0.1)
    daemon.answers["status"] = lambda: time.sleep(1)
    assert epdctl(daemon, "status") == 1
    assert "did not answer" in capsys.readouterr().err


class Api(BaseHTTPRequestHandler):
    """Keeps the request, streams `lines`."""

    lines = [b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}', b"",
             b'data: {"choices": [{"delta": {"content": "A red "}}]}', b"", b": beat",
             'data: {"choices": [{"delta": {"content": "circle \u00e9"}}]}'.encode(), b"", b"data: [DONE]", b""]
    status = 200

    def do_POST(self):
        self.server.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"\n".join(self.lines))

    def log_message(self, *args):
        pass


@pytest.fixture
def api(daemon):
    handler = type("Handler", (Api,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        daemon.answers["status"] = snapshot(listen={"host": "0.0.0.0", "port": server.server_port})
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def test_chat(daemon, api, tmp_path, capsys):
    (tmp_path / "a.PNG").write_bytes(b"png")
    assert epdctl(daemon, "chat", "-i", str(tmp_path / "a.PNG"), "-i", "https://host/b.jpg", "What is it?") == 0
    assert capsys.readouterr().out == "A red circle \u00e9\n"
    assert api.body["stream"] is True
    assert api.body["messages"] == [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}},
        {"type": "image_url", "image_url": {"url": "https://host/b.jpg"}},
        {"type": "text", "text": "What is it?"}]}]


@pytest.mark.parametrize("status, lines, words", [
    (400, [b'{"error": {"message": "too many images"}}'], "too many images"),
    (502, [b"<html>"], "HTTP 502"),
    (200, [b'data: {"error": {"message": "worker lost"}}', b""], "worker lost"),
    (200, [b'data: {"choices": [{"delta": {"content": "A"}}]}', b""], "ended the answer early")])
def test_chat_fails(daemon, api, capsys, status, lines, words):
    api.RequestHandlerClass.status, api.RequestHandlerClass.lines = status, lines
    assert epdctl(daemon, "chat", "What?") == 1
    assert words in capsys.readouterr().err


def test_chat_with_a_missing_file(daemon, api, capsys):
    assert epdctl(daemon, "chat", "-i", "/nowhere.png", "What?") == 2


def test_status_is_light(daemon):
    """Users wait for it, and scripts call it often."""
    code = ("import sys; from epdd.ctl.main import main; main(sys.argv[1:]); "
            "print(sorted({'torch', 'transformers', 'rich', 'msgspec', 'aiohttp'} & set(sys.modules)))")
    out = subprocess.run([sys.executable, "-c", code, "--socket", daemon.server_address, "status"],
                         capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_a_reader_that_has_enough_is_no_error(daemon):
    command = f"{sys.executable} -m epdd.ctl.main --socket {daemon.server_address} status --json | head -c 1"
    run = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=os.environ)
    assert (run.stdout, run.stderr) == ("{", "")
