"""Format, size and orientation of an image file from its header; no pixel is decoded.

Reading needs no more than the file's own bytes: a small file that claims enormous dimensions costs nothing
here.  The orientation is the one Pillow finds, which is what encoders turn the pixels by.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from epdd.errors import MediaError

_ORIENTATION = 0x0112       # EXIF tag
_SEGMENTS_MAX = 4096        # of a JPEG before its pixels: bounds the time that a hostile file takes
_CHUNKS_MAX = 65536         # of a PNG or WebP, for the same reason
_TURNED = (5, 6, 7, 8)      # orientations that swap width and height
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=\"|>)([0-9])")


@dataclass(frozen=True)
class _Raw:
    width: int
    height: int
    exif: bytes = b""
    xmp: bytes = b""


def size(data: bytes) -> tuple[int, int]:
    """(width, height) in upright pixels.

    Raises MediaError: empty_image_file, invalid_image_format for anything but JPEG, PNG, WebP, GIF and BMP,
    image_parse_error for a damaged header.
    """
    if not data:
        raise MediaError("The image file is empty", code="empty_image_file")
    try:
        raw = _reader(data)(data)
    except (IndexError, ValueError, struct.error):      # the file ends inside its header
        raw = _Raw(0, 0)
    if raw.width <= 0 or raw.height <= 0:
        raise MediaError("The image file is damaged: its header cannot be read", code="image_parse_error")
    if _orientation(raw) in _TURNED:
        return raw.height, raw.width
    return raw.width, raw.height


def _reader(data: bytes) -> Callable[[bytes], _Raw]:
    """By the first bytes: labels and file names are often wrong."""
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _gif
    if data.startswith(b"BM"):
        return _bmp
    raise MediaError("The image is in no known format; JPEG, PNG, WebP, GIF and BMP are supported",
                     code="invalid_image_format")


def _jpeg(data: bytes) -> _Raw:
    at, width, height, exif, xmp = 2, 0, 0, b"", b""
    for _ in range(_SEGMENTS_MAX):
        at = data.index(b"\xff", at)    # bytes between segments are skipped, as decoders do
        marker = data[at + 1]
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD8:      # fill, or a marker without a body
            at += 1 if marker == 0xFF else 2
            continue
        length, = struct.unpack_from(">H", data, at + 2)
        if marker in (0xD9, 0xDA):      # the end, or pixels: EXIF may come as late as here
            break
        body = data[at + 4:at + 2 + length]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):     # start of frame
            height, width = struct.unpack_from(">HH", body, 1)
        elif marker == 0xE1 and body.startswith(b"Exif\0\0"):
            exif += body[6:]            # long EXIF data continues in the next segment
        elif marker == 0xE1 and body.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
            xmp = body
        at += 2 + length
    return _Raw(width, height, exif, xmp)


def _png(data: bytes) -> _Raw:
    width, height = struct.unpack_from(">II", data, 16)
    exif, xmp, at = b"", b"", 8
    for _ in range(_CHUNKS_MAX):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind in (b"IDAT", b"IEND"):
            break
        if kind == b"eXIf":
            exif = data[at + 8:at + 8 + length]
        elif kind == b"iTXt" and data.startswith(b"XML:com.adobe.xmp\0", at + 8):
            xmp = data[at + 8:at + 8 + length]
        at += 12 + length
    # EXIF behind the pixels is forbidden, and encoders do not decode a PNG to look for it.
    return _Raw(width, height, exif, xmp if exif else b"")


def _webp(data: bytes) -> _Raw:
    kind = data[12:16]
    if kind == b"VP8 ":             # lossy: two 14-bit sizes after the start code
        if data[23:26] != b"\x9d\x01\x2a":
            return _Raw(0, 0)
        width, height = struct.unpack_from("<HH", data, 26)
        return _Raw(width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L":
        bits, = struct.unpack_from("<I", data, 21)
        return _Raw((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind != b"VP8X":
        return _Raw(0, 0)
    width = int.from_bytes(data[24:27], "little") + 1
    height = int.from_bytes(data[27:30], "little") + 1
    exif, xmp, at = b"", b"", 12
    for _ in range(_CHUNKS_MAX):
        if at + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"EXIF":
            exif = data[at + 8:at + 8 + length]
        elif kind == b"XMP ":
            xmp = data[at + 8:at + 8 + length]
        at += 8 + length + length % 2
    return _Raw(width, height, exif, xmp)


def _gif(data: bytes) -> _Raw:
    width, height = struct.unpack_from("<HH", data, 6)
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)     # after the global colour table
    for _ in range(_CHUNKS_MAX):
        if data[at] == 0x2C:            # the first frame; one that is larger than the screen enlarges it
            left, top, wide, high = struct.unpack_from("<HHHH", data, at + 1)
            return _Raw(max(width, left + wide), max(height, top + high))
        if data[at] != 0x21:
            break
        at += 2                         # an extension: sub-blocks up to an empty one
        while data[at]:
            at += 1 + data[at]
        at += 1
    return _Raw(0, 0)


def _bmp(data: bytes) -> _Raw:
    header, = struct.unpack_from("<I", data, 14)
    if header == 12:                # the OS/2 kind
        width, height = struct.unpack_from("<HH", data, 18)
        return _Raw(width, height)
    width, height = struct.unpack_from("<ii", data, 18)
    return _Raw(width, abs(height))     # negative: rows from the top


def _orientation(raw: _Raw) -> int:
    """1 to 8; 1 (upright) where nothing or nonsense is said."""
    found = _exif_orientation(raw.exif)
    if found is None:
        match = _XMP_ORIENTATION.search(raw.xmp)
        found = int(match[1]) if match else 1
    return found


def _exif_orientation(exif: bytes) -> int | None:
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return None
    try:
        at, = struct.unpack_from(order + "I", exif, 4)
        count, = struct.unpack_from(order + "H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, values = struct.unpack_from(order + "HHI", exif, entry)
            if tag == _ORIENTATION and values == 1 and kind in (3, 4):
                value: int = struct.unpack_from(order + ("H" if kind == 3 else "I"), exif, entry + 8)[0]
                return value
    except struct.error:
        pass
    return None
