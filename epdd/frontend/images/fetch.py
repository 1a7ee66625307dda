"""Image files by http(s): only from allowed addresses, and within time, size and redirect limits.

A host is looked up once a hop, all of its addresses are checked, and only these are dialled, so a name that changes
its answer between check and use gains nothing.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import os
import socket
from collections.abc import Callable
from urllib.parse import quote

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from epdd import __version__
from epdd.errors import MediaError
from epdd.frontend.images.addresses import Address, Allowlist, is_public
from epdd.frontend.images.turns import Turns
from epdd.settings.service import MediaSettings

# As web servers have it.  Parsing holds the event loop: seconds for megabytes, and for a host's name outside ASCII a
# time that grows with its square, 20 ms at this length.
URL_CHARS_MAX = 8 << 10
# Lookup threads for each fetch: a lookup without an answer continues after its fetch has ended.
_LOOKUPS = 2
_READ_BYTES = 1 << 16
# By which an answer's head and chunk sizes may exceed the bytes of its image so far.
_FRAMING_BYTES_MAX = 32 << 10
_PIECE_BYTES = 8 << 10          # parsed before framing is checked again: 1 to 5 ms
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))
_REDIRECTS = (301, 302, 303, 307, 308)
# Not compressed: a small answer could unpack to a large one, and images gain nothing.
_HEADERS = {"User-Agent": f"epdd/{__version__}", "Accept": "image/*, */*;q=0.5", "Accept-Encoding": "identity"}


class Fetcher:
    """Fetches image files for all requests."""

    def __init__(self, config: MediaSettings) -> None:
        """Must be made inside the running loop.  Raises ConfigError on a bad allowlist."""
        self._config = config
        self._turns = Turns(config.max_fetches)
        self._gate = _Gate(config.fetch, Allowlist(config.allow))
        # No reuse: a kept connection was checked for another request's URL.
        connector = aiohttp.TCPConnector(resolver=self._gate, use_dns_cache=False, force_close=True, limit=0)
        answer: Callable[..., ResponseHandler] = _Response
        connector._factory = functools.partial(answer, loop=asyncio.get_running_loop())
        os.environ.setdefault("UV_THREADPOOL_SIZE", str(_LOOKUPS * config.max_fetches))     # read at the first lookup
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers=_HEADERS, auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        await self._session.close()

    async def fetch(self, address: str, count: Callable[[int], None] = lambda size: None,
                    request: object = None) -> bytes:
        """The file's bytes; `count` is called with the size of each piece, and may raise.

        Waiting requests take turns; the time limit starts with the fetch, not with the wait.

        Raises MediaError: invalid_image_url if the address is malformed or not allowed, image_file_too_large,
        failed_to_download_image otherwise.
        """
        if self._config.fetch == "off":
            raise _refused("Images by URL are switched off on this server; send a data: URL")
        url = _parse(address)
        async with self._turns.take(request):
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    return await self._follow(url, count)
            except TimeoutError:
                raise _failed(f"it took over {self._config.timeout_s:g} s") from None
            except aiohttp.InvalidURL:
                raise _malformed() from None
            except (aiohttp.ClientError, OSError, ValueError):
                # The library's message may name internal addresses.
                raise _failed("the connection failed") from None

    async def _follow(self, url: URL, count: Callable[[int], None]) -> bytes:
        for _ in range(self._config.max_redirects + 1):
            self._gate.check_literal(url)
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await self._read(response, count)
                target = response.headers.get("Location", "")
            url = _parse(target, base=url)
        raise _failed(f"over {self._config.max_redirects} redirects")

    async def _read(self, response: aiohttp.ClientResponse, count: Callable[[int], None]) -> bytes:
        if response.status != 200:
            raise _failed(f"the server answered {response.status}")
        most = self._config.max_file_bytes
        data = bytearray()
        if (response.content_length or 0) <= most:
            async for piece in response.content.iter_chunked(_READ_BYTES):
                count(len(piece))
                data += piece
                if len(data) > most:
                    break
            else:
                return bytes(data)
        raise MediaError(f"The image file is over the limit of {most} bytes", code="image_file_too_large")


class _Response(ResponseHandler):
    """A host's answer, which fails if it is more framing than image.

    Each interim answer or chunk, however small, runs Python code: a host that sends nothing else would hold the event
    loop for seconds.
    """

    _came = 0

    def data_received(self, data: bytes) -> None:
        """Bytes from the host."""
        for at in range(0, len(data), _PIECE_BYTES):
            piece = data[at:at + _PIECE_BYTES]
            super().data_received(piece)
            self._came += len(piece)
            # Gone once the connection is lost.
            body = self._payload.total_bytes if self._payload is not None else 0
            if self._came > 2 * body + _FRAMING_BYTES_MAX:
                self._fail()
                return

    def _fail(self) -> None:
        error = aiohttp.ClientPayloadError("too little of the answer is its body")
        self.set_exception(error)
        if self._payload is not None:
            self._payload.set_exception(error)
        if self.transport is not None:
            self.transport.abort()


class _Gate(AbstractResolver):
    """Resolves names and passes only allowed addresses to the connector."""

    def __init__(self, mode: str, allowlist: Allowlist) -> None:
        self._mode = mode
        self._allowlist = allowlist

    def check_literal(self, url: URL) -> None:
        """Check an address literal, which the connector dials without a resolver."""
        try:
            address = ipaddress.ip_address(url.host or "")
        except ValueError:
            return
        self._check(str(address), url.port or 0, address)

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
                      ) -> list[ResolveResult]:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        results = []
        for kind, _, proto, _, target in found:
            # Every address, not only the first: connecting falls back from one to the next.
            self._check(host, port, ipaddress.ip_address(target[0]))
            results.append(ResolveResult(hostname=host, host=str(target[0]), port=port, family=kind, proto=proto,
                                         flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV))
        return results

    async def close(self) -> None:
        """Nothing to close."""

    def _check(self, host: str, port: int, address: Address) -> None:
        allowed = self._allowlist.has(host, port, address) if self._mode == "allowlist" else is_public(address)
        if not allowed:
            raise _refused("The image URL leads to an address that this server does not fetch from")


def _parse(address: str, base: URL | None = None) -> URL:
    """Path and query keep their bytes, since a signature may cover them; the host's name is converted to ASCII.

    Bytes that a request line cannot hold are percent-encoded: non-ASCII letters (UTF-8), white space, control
    characters.
    """
    if len(address) > URL_CHARS_MAX:
        raise _refused(f"The image URL is over {URL_CHARS_MAX} characters long")
    try:
        given = URL(address, encoded=True)
        if base is not None:
            given = base.join(given)
        url = URL(str(given))       # normalised by yarl: the host is taken from it
        if url.scheme in ("http", "https") and url.host and url.port:
            return URL.build(scheme=url.scheme, authority=url.raw_authority, path=_printable(given.raw_path) or "/",
                             query_string=_printable(given.raw_query_string), encoded=True)
    except ValueError:
        pass
    raise _malformed()


def _printable(text: str) -> str:
    # Bytes of a Location header that are not UTF-8 come as surrogates.
    return quote(text.encode("utf-8", "surrogateescape"), safe=_PRINTABLE)


def _malformed() -> MediaError:
    return _refused("The image URL is not a valid http or https URL")


def _refused(message: str) -> MediaError:
    return MediaError(message, code="invalid_image_url")


def _failed(why: str) -> MediaError:
    return MediaError(f"The image could not be downloaded: {why}", code="failed_to_download_image")
