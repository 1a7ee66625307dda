"""API keys: which requests may use the API, and which share caches.

Only hashes of keys are kept.  They are never logged or sent to a worker.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from epdd.errors import ConfigError, Unauthorized
from epdd.settings.service import ServerSettings

# Probes of load balancers and service managers carry no key, and these pages show only states.  The chat page
# asks for the key itself; its files are the same in every installation.
OPEN = frozenset(("/health", "/ready", "/ping", "/"))
OPEN_BELOW = "/page/"


class Keys:
    """If no keys are set, every request may use the API, whatever key it carries."""

    def __init__(self, server: ServerSettings) -> None:
        """Raises ConfigError."""
        self._secret = secrets.token_bytes(32)      # keeps a worker from guessing keys
        self.load(server)

    def load(self, server: ServerSettings) -> None:
        """Replace the keys by those of these settings and of their file as it is now.

        Raises ConfigError; the old keys then stay.
        """
        self._hashes = [_hash(key) for key in _read(server)]
        self._shared = server.share_caches

    @property
    def needed(self) -> bool:
        return bool(self._hashes)

    def check(self, request: web.Request) -> None:
        """Raises Unauthorized."""
        if not self._hashes or request.path in OPEN or request.path.startswith(OPEN_BELOW):
            return
        scheme, sent = _sent(request)
        # Hashes are compared, and all of them: so the time does not depend on any key.
        matches = [hmac.compare_digest(sent, known) for known in self._hashes]
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized("This server needs an API key: send a valid one as Authorization: Bearer KEY")

    def salt(self, request: web.Request, cache_salt: str) -> str:
        """Requests share caches if this is equal: the same key and the same `cache_salt`.

        32 hex digits that reveal neither and change with a restart.  Empty without both.  With server.share_caches the
        key does not count.
        """
        tenant = b"" if self._shared or not self._hashes else _sent(request)[1]
        if not tenant and not cache_salt:
            return ""
        return self._digest(tenant.ljust(32, b"\0") + cache_salt.encode())

    def tenant(self, request: web.Request) -> str:
        """Equal for all requests of one API key, whatever caches they share; empty without keys.

        It reveals no more of the key than `salt`.
        """
        return self._digest(_sent(request)[1]) if self._hashes else ""

    def _digest(self, content: bytes) -> str:
        return hashlib.blake2b(content, key=self._secret, digest_size=16).hexdigest()

    def middleware(self) -> Middleware:

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.check(request)
            return await handler(request)

        return guard


def _read(server: ServerSettings) -> list[str]:
    """The keys of the settings and of their file, which has one a line, empty lines and comments (#).

    Raises ConfigError if the file cannot be read or holds no key, or if a header cannot carry a key.
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


def _sent(request: web.Request) -> tuple[str, bytes]:
    """The scheme of a request's Authorization header and the hash of its key."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return scheme, _hash(key.strip())


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
