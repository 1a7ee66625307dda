"""The admin socket: private, one line in and out, robust against any input."""

import asyncio
import json
import os
import stat

import pytest

from epdd.errors import NotFound, StartupError
from epdd.ops.admin import LINE_BYTES_MAX, AdminServer
from epdd.settings.service import AdminSettings


def refuse(request):
    raise NotFound("no such worker")


@pytest.fixture
async def server(tmp_path):
    verbs = {"echo": lambda request: request["worker"], "drain": refuse, "broken": lambda request: 1 / 0}
    server = AdminServer(tmp_path / "run" / "admin.sock", AdminSettings(), verbs)
    await server.start()
    yield server
    await server.stop()


async def ask(server, line: bytes):
    reader, writer = await asyncio.open_unix_connection(server.path)
    writer.write(line + b"\n")
    answer = await reader.readline()
    writer.close()
    return json.loads(answer) if answer else None


async def test_answers_and_errors(server):
    assert await ask(server, b'{"verb": "echo", "worker": "pd/0"}') == {"ok": True, "result": "pd/0"}
    assert (await ask(server, b'{"verb": "drain"}')) == {"ok": False, "code": "not_found", "error": "no such worker"}
    assert (await ask(server, b'{"verb": "broken"}'))["error"] == "internal error, see the log"
    assert "echo" in (await ask(server, b'{"verb": "nonsense"}'))["error"]
    for line in (b"nonsense", b"[]", b"\x80\x04K\x01.", b"null", b'{"verb": []}'):
        assert (await ask(server, line))["code"] == "invalid_request"


async def test_an_endless_line_ends_its_connection_only(server):
    assert await ask(server, b"x" * (2 * LINE_BYTES_MAX)) is None
    assert (await ask(server, b'{"verb": "version"}'))["ok"] is True


async def test_only_the_owner_may_open_it(server):
    assert stat.S_IMODE(os.stat(server.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(server.path.parent).st_mode) == 0o700


async def test_a_living_daemons_socket_is_kept_and_a_dead_ones_replaced(server, tmp_path):
    second = AdminServer(server.path, AdminSettings(), {})
    with pytest.raises(StartupError, match="another daemon"):
        await second.start()
    stale = tmp_path / "stale.sock"
    dead = await asyncio.start_unix_server(lambda r, w: None, stale)
    dead.close()
    await dead.wait_closed()
    assert stale.exists()
    third = AdminServer(stale, AdminSettings(), {"ok": lambda request: True})
    await third.start()
    assert (await ask(third, b'{"verb": "ok"}'))["result"] is True
    await third.stop()
    assert not stale.exists()


async def test_a_file_in_the_sockets_place_is_kept(tmp_path):
    path = tmp_path / "notes"
    path.write_text("precious")
    with pytest.raises(StartupError, match="no socket"):
        await AdminServer(path, AdminSettings(), {}).start()
    assert path.read_text() == "precious"
