"""Size and orientation of an image file from its header, and limits on its decoding time; no pixel is decoded.

The orientation is the one that Pillow finds.  The daemon sends size and orientation to the encoder with the file.  The
encoder rotates the pixels by it, and refuses the file if its decoder finds another size.

The number of pixels does not bound a decoder's time: a file may hold thousands of scans of the same pixels, or millions
of empty parts.  So scans and parts are counted too.  The limits are far above the files that real programs write; the
worst accepted file takes the decoder about 3 s.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from epdd.errors import MediaError
from epdd.frontend.images import image_format

_ORIENTATION = 0x0112           # EXIF tag
_TURNED = (5, 6, 7, 8)          # orientations that swap width and height
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=\"|>)([0-9])")

_SEGMENTS_MAX = 4096            # of a JPEG, before its pixels and between its scans
_EXIF_SEGMENTS_MAX = 64         # of those: 4 MB; cameras write one
_SCANS_FREE = 16                # of a JPEG of any size: a progressive one usually has 10
_SCANS_MAX = 500                # as libjpeg-turbo's own tools allow
_SCANS_PIXELS_MAX = 1_500_000_000   # scans x pixels: about 3 s of libjpeg at worst
_ARITHMETIC = (0xC9, 0xCA)      # starts of frame: arithmetic coding needs almost no bytes for many pixels, and ...
_ARITHMETIC_SCAN = 5            # ... decodes each component of a scan in the time of this many other scans
_MARKS_MAX = 3_000_000          # bytes of 255 that are searched for scans: 0.05 s
_CHUNKS_MAX = 1 << 15           # of a PNG or WebP: 1 KiB each in the largest file
_BLOCKS_MAX = 1 << 16           # of a GIF before its first frame: extensions and their sub-blocks
# Pillow decodes run-length BMPs in Python, run by run and partly pixel by pixel: 1.5 s at these limits.
_RUN_LENGTH_BYTES_MAX = 2 << 20
_RUN_LENGTH_PIXELS_MAX = 10_000_000

# In a scan: a byte of 255 that is neither escaped, nor a restart marker, nor fill.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")


@dataclass(frozen=True)
class Header:
    """Of the first frame: its size as stored, and the rotation that makes it upright."""

    width: int
    height: int
    orientation: int = 1        # EXIF's, 1 (upright) to 8

    @property
    def upright(self) -> tuple[int, int]:
        """(width, height)"""
        return (self.height, self.width) if self.orientation in _TURNED else (self.width, self.height)


@dataclass(frozen=True)
class _Raw:
    width: int
    height: int
    exif: bytes = b""
    xmp: bytes = b""


class _TooManyParts(Exception):
    """The message names the parts and their limit."""


def read(data: bytes) -> Header:
    """Raises MediaError: empty_image_file; invalid_image_format and unsupported_image_media_type, as `image_format`
    does; image_parse_error for a damaged header; image_too_large for one whose decoding is not bounded."""
    if not data:
        raise MediaError("The image file is empty", code="empty_image_file")
    reader = _READERS[image_format.of(data)]
    try:
        raw = reader(data)
    except _TooManyParts as error:
        raise MediaError(f"The image file has {error}, so it would take too long to decode; save it again, or as a "
                         "plain PNG or JPEG", code="image_too_large") from None
    except (IndexError, ValueError, struct.error):      # the file ends inside its header
        raw = _Raw(0, 0)
    if raw.width <= 0 or raw.height <= 0:
        raise MediaError("The image file is damaged: its header cannot be read", code="image_parse_error")
    return Header(raw.width, raw.height, _orientation(raw))


def _jpeg(data: bytes) -> _Raw:
    at, size, exif, xmp, arithmetic = 2, (0, 0), [], b"", False
    for _ in range(_SEGMENTS_MAX):
        at = data.index(b"\xff", at)    # bytes between segments are skipped, as decoders do
        marker = data[at + 1]
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD7:      # fill, or a marker without a body
            at += 1 if marker == 0xFF else 2
            continue
        if marker in (0xD8, 0xD9):      # no pixels
            return _Raw(0, 0)
        length, = struct.unpack_from(">H", data, at + 2)
        if marker == 0xDA:              # pixels: EXIF may come as late as here
            break
        body = data[at + 4:at + 2 + length]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):     # start of frame
            if size != (0, 0):
                return _Raw(0, 0)       # a second one: decoders differ in which they use
            height, width = struct.unpack_from(">HH", body, 1)
            size, arithmetic = (width, height), marker in _ARITHMETIC
        elif marker == 0xE1 and body.startswith(b"Exif\0\0"):
            exif.append(body[6:])       # long EXIF data continues in the next segment
        elif marker == 0xE1 and body.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
            xmp = body
        at += 2 + length
    else:
        raise _TooManyParts(f"over {_SEGMENTS_MAX} segments before its pixels")
    if len(exif) > _EXIF_SEGMENTS_MAX:
        raise _TooManyParts(f"over {_EXIF_SEGMENTS_MAX} segments of EXIF data")
    _check_scans(data, at, size[0] * size[1], arithmetic)
    return _Raw(*size, b"".join(exif), xmp)


def _check_scans(data: bytes, at: int, pixels: int, arithmetic: bool) -> None:
    """Raises _TooManyParts if a JPEG whose first scan is at `at` has too many scans for its pixels."""
    # At most as many scans: metadata, a second picture or a film behind the first hold such bytes too.
    if not arithmetic and data.count(b"\xff\xda", at) <= _SCANS_FREE:
        return
    if data.count(b"\xff", at) > _MARKS_MAX:
        raise _TooManyParts("too many markers")
    scans = segments = work = 0
    while found := _MARKER.search(data, at):
        marker, at = data[found.start() + 1], found.end()
        if marker == 0xD9:
            return
        if marker == 0x01 or marker == 0xD8:
            continue
        if marker == 0xDA:
            scans += 1
            work += _ARITHMETIC_SCAN * data[at + 2] if arithmetic else 1
        segments += 1
        if scans > _SCANS_MAX or work > _SCANS_FREE and work * pixels > _SCANS_PIXELS_MAX:
            raise _TooManyParts(f"{scans} arithmetic-coded scans or more" if arithmetic else f"over {scans - 1} scans")
        if segments > _SEGMENTS_MAX:
            raise _TooManyParts(f"over {_SEGMENTS_MAX} segments between its scans")
        at += int.from_bytes(data[at:at + 2], "big")


def _png(data: bytes) -> _Raw:
    # Decoders take the last of several headers, wherever it is.
    if data[8:16] != b"\0\0\0\x0dIHDR":
        return _Raw(0, 0)
    width, height = struct.unpack_from(">II", data, 16)
    exif, xmp, at, pixels = b"", b"", 33, False
    for _ in range(_CHUNKS_MAX):
        if pixels and at + 8 > len(data):
            break                       # cut off in its pixels: the decoder refuses it
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            break
        if kind == b"IHDR":
            return _Raw(0, 0)
        if kind == b"IDAT":
            pixels = True
        elif kind == b"eXIf":
            exif = data[at + 8:at + 8 + length]
        elif kind == b"iTXt" and data.startswith(b"XML:com.adobe.xmp\0", at + 8):
            xmp = data[at + 8:at + 8 + length]
        at += 12 + length
    else:
        raise _TooManyParts(f"over {_CHUNKS_MAX} chunks")
    return _Raw(width, height, exif, xmp)


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
            return _Raw(width, height, exif, xmp)
        kind, length = struct.unpack_from("<4sI", data, at)
        # The first one of each, and only if the flags announce it, as libwebp does.
        if kind == b"EXIF" and data[20] & 8 and not exif:
            exif = data[at + 8:at + 8 + length]
        elif kind == b"XMP " and data[20] & 4 and not xmp:
            xmp = data[at + 8:at + 8 + length]
        at += 8 + length + length % 2
    raise _TooManyParts(f"over {_CHUNKS_MAX} chunks")


def _gif(data: bytes) -> _Raw:
    width, height = struct.unpack_from("<HH", data, 6)
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)     # after the global colour table
    extension = False
    for _ in range(_BLOCKS_MAX):
        if extension:                   # sub-blocks up to an empty one
            extension = data[at] > 0
            at += 1 + data[at]
        elif data[at] == 0x2C:          # the first frame; one that is larger than the screen enlarges it
            left, top, wide, high = struct.unpack_from("<HHHH", data, at + 1)
            return _Raw(max(width, left + wide), max(height, top + high))
        elif data[at] == 0x21:
            extension = True
            at += 2
        else:
            return _Raw(0, 0)
    raise _TooManyParts(f"over {_BLOCKS_MAX} blocks before its first frame")


def _bmp(data: bytes) -> _Raw:
    header, = struct.unpack_from("<I", data, 14)
    if header == 12:                # the OS/2 kind
        width, height = struct.unpack_from("<HH", data, 18)
        return _Raw(width, height)
    width, height, _, _, compression = struct.unpack_from("<iiHHI", data, 18)
    if compression in (1, 2) and (len(data) > _RUN_LENGTH_BYTES_MAX or width * abs(height) > _RUN_LENGTH_PIXELS_MAX):
        raise _TooManyParts(f"run-length compressed pixels, and over {_RUN_LENGTH_BYTES_MAX} bytes or "
                            f"{_RUN_LENGTH_PIXELS_MAX} pixels")
    return _Raw(width, abs(height))     # negative: rows from the top


_READERS = {"JPEG": _jpeg, "PNG": _png, "WEBP": _webp, "GIF": _gif, "BMP": _bmp}


def _orientation(raw: _Raw) -> int:
    """1 to 8; 1 (upright) if it is missing or invalid."""
    found = _exif_orientation(raw.exif)
    if found is None:
        match = _XMP_ORIENTATION.search(raw.xmp)
        found = int(match[1]) if match else 1
    return found if 1 <= found <= 8 else 1


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
