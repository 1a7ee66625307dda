"""Listeners besides TCP, and API keys; without workers."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import aiohttp

from tests.e2e.daemon import ROOT, running


def test_a_unix_socket_with_keys(tmp_path, monkeypatch):
    path, keys = tmp_path / "run" / "api.sock", tmp_path / "keys"
    keys.write_text("sk-file\n")
    monkeypatch.setenv("EPDD_SERVER_API_KEYS", "sk-env")

    async def ask(page, key=None):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http:
            async with http.get(f"http://epdd{page}", headers=headers) as answer:
                return answer.status, await answer.json()

    with running(server__unix_socket=path, server__api_keys_file=keys, server__head_timeout_s=1) as daemon:
        with socket.socket(socket.AF_UNIX) as silent:       # has as long as one that came by TCP
            silent.settimeout(30)
            silent.connect(str(path))
            assert silent.recv(1) == b""
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert daemon.get("/health")[0] == asyncio.run(ask("/health"))[0] == 200
        assert daemon.get("/v1/models")[0] == asyncio.run(ask("/v1/models"))[0] == 401
        for key in ("sk-env", "sk-file"):
            assert asyncio.run(ask("/v1/models", key))[1]["data"][0]["id"] == "epdd-demo"
        assert daemon.status()["listen"]["port"] == daemon.port > 0
        assert "sk-" not in daemon.log()
        # What it prints can be pasted where a key is in the environment, and says what is missing where none is.
        daemon.ready()
        text = daemon.log()
        ctl = next(line for line in text.splitlines() if " chat -i " in line)
        curl = text[text.index("  curl -s"):].split("\n\n")[0]
        for command in (ctl, curl):
            for key, word in (("sk-file", "red"), ("wrong", "This server needs an API key")):
                ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT,
                                       env=os.environ | {"EPDD_API_KEY": key, "PYTHONPATH": str(ROOT)})
                assert word in ended.stdout + ended.stderr
        assert "sk-" not in daemon.log()
        # What epdctl and others of this machine can read of the process.
        assert b"sk-" not in Path(f"/proc/{daemon.process.pid}/cmdline").read_bytes()
    assert not path.exists()


def test_a_file_without_keys_opens_nothing(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# later\n")
    command = [sys.executable, "-m", "epdd", "--port", "0", "--set", f"admin.socket={tmp_path}/s",
               "--set", f"server.api_keys_file={keys}"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 78 and "holds no key" in ended.stderr and "Traceback" not in ended.stderr
