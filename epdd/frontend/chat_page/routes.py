"""The page's files over HTTP, read once when the application is built."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import orjson
from aiohttp import web

from epdd.families import DEMO
from epdd.frontend.chat_page.figures import Figures
from epdd.frontend.context import Context

_FILES = Path(__file__).parent / "files"
_SAMPLES = DEMO / "samples"

# Pictures and questions that the demo model answers well, each asked with one click.
_EXAMPLES = (
    ("What colour is the circle?", ("red-circle.png",)),
    ("What shape is this?", ("green-triangle.png",)),
    ("How many shapes are there?", ("three-shapes.png",)),
    ("Describe the image.", ("three-shapes.png",)),
    ("List the images in order.", ("red-circle.png", "blue-square.png", "yellow-star.png")),
)

_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
          ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml", ".png": "image/png",
          ".json": "application/json"}

# Nothing from other hosts and nothing inline, so that answers and file names stay text.
# data: and blob: are the pictures that the user has chosen.
_POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
           "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-cache"}      # browsers check each time, so that an upgrade shows at once


def add(router: web.UrlDispatcher, context: Context) -> None:
    """The page at `/`, its files below `/page/`, and `/status`."""
    for file in sorted(path for path in _FILES.rglob("*") if path.is_file()):
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        router.add_get(path, _Static(file.suffix, file.read_bytes()).get)
    examples = _EXAMPLES if Path(context.family.folder) == DEMO else ()
    listed = [{"question": question, "images": names} for question, names in examples]
    router.add_get("/page/examples.json", _Static(".json", orjson.dumps(listed)).get)
    for name in sorted({name for _, names in examples for name in names}):
        router.add_get(f"/page/{name}", _Static(".png", (_SAMPLES / name).read_bytes()).get)
    router.add_get("/status", Figures(context.status).get)


class _Static:
    """One file."""

    def __init__(self, suffix: str, body: bytes) -> None:
        self._body = body
        self._etag = blake2b(body, digest_size=12).hexdigest()
        self._headers = _HEADERS | {"Content-Type": _TYPES[suffix], "ETag": f'"{self._etag}"'}

    async def get(self, request: web.Request) -> web.Response:
        if any(tag.value in (self._etag, "*") for tag in request.if_none_match or ()):
            return web.Response(status=304, headers={name: value for name, value in self._headers.items()
                                                     if name != "Content-Type"})
        return web.Response(body=self._body, headers=self._headers)
