"""The epdctl socket: one JSON line in, one JSON line out, on a Unix socket only its owner can open."""

from __future__ import annotations

import asyncio
import grp
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from epdd import __version__
from epdd.config import Admin
from epdd.errors import BadRequest, ConfigError, EpddError, StartupError

log = logging.getLogger(__name__)

LINE_BYTES_MAX = 64 << 10
IDLE_S = 60.0               # a client that says nothing is hung up on


class AdminServer:
    """Serves verbs; each is a function of the request object that returns something JSON can carry."""

    def __init__(self, path: Path, config: Admin, verbs: dict[str, Callable[[dict[str, Any]], Any]]) -> None:
        self.path = path
        self._config = config
        self._verbs = verbs | {"version": lambda request: __version__}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and listen.  Raises ConfigError (no such group), StartupError (another daemon listens there)."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._clear_stale()
            # Created closed to all others; opened to a group only once it belongs to it.
            mask = os.umask(0o177)
            try:
                self._server = await asyncio.start_unix_server(self._serve, self.path, limit=LINE_BYTES_MAX)
            finally:
                os.umask(mask)
            if self._config.group:
                os.chown(self.path, -1, grp.getgrnam(self._config.group).gr_gid)
                os.chmod(self.path, self._config.mode | 0o060)
            else:
                os.chmod(self.path, self._config.mode)
        except KeyError:
            raise ConfigError(f"admin.group: no group {self._config.group!r}") from None
        except OSError as error:
            raise StartupError(f"admin socket {self.path}: {error.strerror or error}") from None

    def _clear_stale(self) -> None:
        """Remove the socket of a daemon that was killed; never that of a living one."""
        if not self.path.exists():
            return
        if not stat.S_ISSOCK(self.path.stat().st_mode):
            raise StartupError(f"admin.socket: {self.path} is there and no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
            else:
                raise StartupError(f"another daemon listens on {self.path}")

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
            pass    # idle, gone, or a line over the limit: this connection ends, nothing else
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
