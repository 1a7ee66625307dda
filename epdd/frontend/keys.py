"""API keys: who may use the API.  Only their hashes are kept, and nothing of them is ever logged."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from epdd.config import Server
from epdd.errors import ConfigError, Unauthorized

# Probes of load balancers and service managers carry no key, and these pages say nothing but states.  The chat page
# asks for the key itself; its files are the same in every installation.
OPEN = frozenset(("/health", "/ready", "/ping", "/"))
OPEN_BELOW = "/page/"


class Keys:
    """Without any key, everybody may use the API, whatever key they send."""

    def __init__(self, server: Server) -> None:
        """Raises ConfigError."""
        self.load(server)

    def load(self, server: Server) -> None:
        """Take the keys of these settings and of their file as it is now, in place of the old ones.

        Raises ConfigError; the old ones stay then.
        """
        self._hashes = [_hash(key) for key in _read(server)]

    @property
    def needed(self) -> bool:
        return bool(self._hashes)

    def check(self, request: web.Request) -> None:
        """Raises Unauthorized."""
        if not self._hashes or request.path in OPEN or request.path.startswith(OPEN_BELOW):
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        sent = _hash(key.strip())
        # All are compared, and their hashes: the time taken says nothing of any key.
        matches = [hmac.compare_digest(sent, known) for known in self._hashes]
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized("This server needs an API key: send a valid one as Authorization: Bearer KEY")

    def middleware(self) -> Middleware:

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.check(request)
            return await handler(request)

        return guard


def _read(server: Server) -> list[str]:
    """The keys of the settings and of their file: one a line, empty ones and comments (#) aside.

    Raises ConfigError if the file cannot be read, holds no key, or a key could not be sent in a header.
    """
    keys = list(server.api_keys)
    if server.api_keys_file:
        where = f"server.api_keys_file: {server.api_keys_file}"
        try:
            lines = Path(server.api_keys_file).read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"{where}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: not text") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:       # an empty file must not open the API to everybody
            raise ConfigError(f"{where}: holds no key")
        keys += found
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ConfigError("an API key holds characters other than letters, digits and punctuation")
    return keys


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
