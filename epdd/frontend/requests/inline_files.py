"""The image files in a request's JSON, extracted before it is parsed.

A parser holds the interpreter, and so the event loop, from a body's first byte to its last: a second for 128 MiB.  In a
valid body only images in base64 are large, and they need no parser.  So they are extracted in steps, and the remaining
text is bounded by what a prompt can hold.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from epdd.errors import ContextLength, MediaError

TEXT_BYTES = 8 << 20        # for any model; parsed in 15 ms
TEXT_BYTES_MAX = 16 << 20   # for any context length
TOKEN_BYTES = 32            # of JSON for a token of context: escaped as \\uXXXX, a rare script takes half of it
_LEAST = 16 << 10           # shorter URLs are parsed with the rest
_STEP = 4 << 20             # bytes searched before other threads may run
_TRIED_MAX = 10_000         # strings that are tried; later ones are text
_OPEN = b'"data:'
_ESCAPES = ((b"\\/", b"/"), (b"\\n", b"\n"), (b"\\r", b"\r"), (b"\\t", b"\t"))     # allowed in base64


@dataclass(frozen=True)
class InlineLimits:
    """Limits of a body's text and images."""

    text_bytes: int = TEXT_BYTES            # besides images
    file_bytes: int = 32 << 20              # of an image file

    @classmethod
    def of(cls, max_model_len: int, file_bytes: int) -> InlineLimits:
        """For a model with a context of `max_model_len` tokens."""
        return cls(min(max(TEXT_BYTES, TOKEN_BYTES * max_model_len), TEXT_BYTES_MAX), file_bytes)


@dataclass
class Extracted:
    """A body's JSON with a short mark in place of each large data: URL."""

    text: bytes | bytearray
    urls: dict[str, str] = field(default_factory=dict)      # by their marks
    cuts: list[tuple[int, int]] = field(default_factory=list)   # (place in the text, bytes left out there)

    def place(self, at: int) -> int:
        """The byte of the body that is the text's byte `at`."""
        return at + sum(left_out for cut, left_out in self.cuts if cut <= at)

    def restore(self, data: Any) -> bool:
        """Put the URLs back into the images of messages; False if one was anywhere else."""
        left = set(self.urls)
        for holder, key in _images(data) if left else ():
            if isinstance(url := holder[key], str) and url in self.urls:
                holder[key] = self.urls[url]
                left.discard(url)
        return not left


def extract(body: bytes | bytearray, limits: InlineLimits) -> Extracted:
    """Extract large data: URLs.  Raises ContextLength if the remaining text is over its limit, MediaError if an image
    is."""
    if len(body) < 2 * _LEAST:
        return Extracted(body)
    nonce = secrets.token_hex(8)        # keeps text of the request from equalling a mark
    found, pieces = Extracted(b""), list[bytes | bytearray]()
    begun = at = size = tried = 0
    while at < len(body) and tried < _TRIED_MAX:
        start = body.find(_OPEN, at, at + _STEP + len(_OPEN))
        if start < 0:
            at += _STEP
            _check(size + min(at, len(body)) - begun, limits)
            continue
        tried += 1
        at = start + 1
        if _escaped(body, start):
            continue
        at = end = _closing(body, start + 1)
        if end - start < _LEAST or _escaped(body, end) or (url := _plain(body, start + 1, end, limits)) is None:
            continue
        mark = f"data:{nonce},{len(found.urls)}"
        found.urls[mark] = url
        pieces += body[begun:start + 1], mark.encode()
        size += start + 1 - begun + len(mark)
        _check(size, limits)
        found.cuts.append((size, end - start - 1 - len(mark)))
        begun = end
    if not found.urls:
        _check(len(body), limits)
        return Extracted(body)
    _check(size + len(body) - begun, limits)
    found.text = b"".join((*pieces, body[begun:]))
    return found


def _images(data: Any) -> Iterator[tuple[Any, Any]]:
    """The places of a body's images: (object or list, key) of each."""
    messages = data.get("messages") if isinstance(data, dict) else None
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and "image_url" in part:
                image = part["image_url"]
                yield (image, "url") if isinstance(image, dict) and "url" in image else (part, "image_url")


def _closing(body: bytes | bytearray, start: int) -> int:
    """The next quotation mark, or the body's end.  If it is escaped, the string is no URL."""
    for at in range(start, len(body), _STEP):
        if (end := body.find(b'"', at, at + _STEP)) >= 0:
            return end
    return len(body)


def _escaped(body: bytes | bytearray, at: int) -> bool:
    """Whether an odd number of backslashes precedes."""
    first = at
    while first and body[first - 1] == 0x5c:
        first -= 1
        if at - first > 64:     # not in a URL, and slow to count
            return True
    return (at - first) % 2 == 1


def _plain(body: bytes | bytearray, start: int, end: int, limits: InlineLimits) -> str | None:
    """The URL in that JSON string; None if it has escapes or letters that base64 does not need."""
    if end - start > limits.file_bytes * 2 + _LEAST:    # base64 with every letter escaped has 2.7 bytes for each
        raise _too_large(limits)
    pieces, left = [], limits.file_bytes * 3 // 2 + _LEAST      # base64 with line breaks has 1.4 bytes for each
    while start < end:
        stop = min(start + _STEP, end)
        if stop < end and body[stop - 1] == 0x5c:
            stop += 1
        piece = body[start:stop]
        if b"\\" in piece:
            for escape, letter in _ESCAPES:
                piece = piece.replace(escape, letter)
            if b"\\" in piece:
                return None
        if not piece.isascii():
            return None
        pieces.append(piece.decode("ascii"))
        left -= len(piece)
        if left < 0:
            raise _too_large(limits)
        start = stop
    return "".join(pieces)


def _too_large(limits: InlineLimits) -> MediaError:
    return MediaError(f"The image file is over the limit of {limits.file_bytes} bytes", code="image_file_too_large",
                      param="messages")


def _check(size: int, limits: InlineLimits) -> None:
    if size > limits.text_bytes:
        raise ContextLength(f"The request has over {limits.text_bytes} bytes besides its images, more than a prompt of "
                            "this model can hold. Please reduce its length.")
