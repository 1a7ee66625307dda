"""The socket of epdctl: a JSON line in, a JSON line out.  By default only the daemon's user can open it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from epdd import __version__, unix_socket
from epdd.errors import BadRequest, EpddError
from epdd.settings.service import AdminSettings

log = logging.getLogger(__name__)

LINE_BYTES_MAX = 64 << 10
IDLE_S = 60.0               # without a line, a connection is closed


class AdminServer:
    """Serves verbs; each is a function that takes the request object and returns JSON data."""

    def __init__(self, path: Path, config: AdminSettings, verbs: dict[str, Callable[[dict[str, Any]], Any]]) -> None:
        self.path = path
        self._config = config
        self._verbs = verbs | {"version": lambda request: __version__}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and listen.  Raises ConfigError (no such group), StartupError (another daemon listens there)."""
        listener = unix_socket.listen(self.path, self._config.mode, self._config.group, "admin.socket")
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=LINE_BYTES_MAX)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await asyncio.wait_for(reader.readline(), IDLE_S):
                writer.write(orjson.dumps(self._answer(line)) + b"\n")
                await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass    # idle, gone, or a line over the limit: only this connection ends
        finally:
            writer.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = orjson.loads(line)
            name = request.get("verb") if isinstance(request, dict) else None
            verb = self._verbs.get(name) if isinstance(name, str) else None
            if verb is None:
                raise BadRequest(f"verbs are {', '.join(sorted(self._verbs))}")
            return {"ok": True, "result": verb(request)}
        except orjson.JSONDecodeError:
            return {"ok": False, "code": "invalid_request", "error": "not JSON"}
        except EpddError as error:
            return {"ok": False, "code": error.code, "error": error.message}
        except Exception:
            log.exception("admin request failed")
            return {"ok": False, "code": "internal_error", "error": "internal error, see the log"}
