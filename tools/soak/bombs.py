"""Files and bodies that are small but slow to decode, or whose header and content differ.  All must be refused.

Decoding any of the images would take seconds or gigabytes.  Each is built byte by byte from its format's specification.
"""

import base64
import io
import json
import random
import struct
import zlib
from collections.abc import Callable

from PIL import Image

SMALL = struct.pack(">II", 64, 64)          # the size that a first look finds
LARGE = 13_000                              # the side that a decoder would find
SCANS = 3_000
SUB_BLOCKS = 1_000_000
SEGMENTS = 60_000
RUNS = 1_500_000


def _segment(marker: int, body: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(body) + 2) + body


def many_scans() -> bytes:
    """A progressive grey JPEG of 8,000 x 8,000 pixels with 3,000 scans."""
    side = 8_000
    blocks = (side // 8) ** 2
    # Two tables with one code, a 0 bit: DC differences of 0, and end-of-band runs of 16,384 blocks.
    tables = _segment(0xC4, bytes((0x00, 1, *[0] * 15, 0x00))) + _segment(0xC4, bytes((0x10, 1, *[0] * 15, 0xE0)))
    first = _segment(0xDA, bytes((1, 1, 0x00, 0, 0, 0))) + bytes(blocks // 8)
    runs = -(-blocks // 16_384)
    more = _segment(0xDA, bytes((1, 1, 0x00, 1, 63, 0))) + bytes(-(-runs * 15 // 8))
    return b"".join((b"\xff\xd8", _segment(0xDB, bytes((0, *[1] * 64))),
                     _segment(0xC2, struct.pack(">BHHBBBB", 8, side, side, 1, 1, 0x11, 0)),
                     tables, first, more * SCANS, b"\xff\xd9"))


def many_segments() -> bytes:
    """A JPEG with tens of thousands of EXIF segments before its pixels."""
    whole = _saved(Image.new("L", (64, 64)), "JPEG")
    return whole[:2] + _segment(0xE1, b"Exif\0\0" + bytes(24)) * SEGMENTS + whole[2:]


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _png_pixels() -> bytes:
    """A PNG of LARGE x LARGE grey pixels of one bit, without signature and first header."""
    rows = zlib.compress(bytes((1 + -(-LARGE // 8)) * LARGE), 9)
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", LARGE, LARGE, 1, 0, 0, 0, 0))
    return header + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


def two_headers() -> bytes:
    """A PNG of 64 x 64 by its first header, of 13,000 x 13,000 by its second."""
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", SMALL + bytes((1, 0, 0, 0, 0))) + _png_pixels()


def header_not_first() -> bytes:
    """A PNG with 64 x 64 where the header's size should be, in a chunk of another kind."""
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"teXt", SMALL + b"\0") + _png_pixels()


def empty_sub_block() -> bytes:
    """A GIF whose extension begins with an empty sub-block, which decoders read differently."""
    whole = _saved(Image.new("P", (9_000, 9_000)), "GIF")
    frame = whole.index(b"\x2c\0\0\0\0" + struct.pack("<H", 9_000), 13)
    small = b"\x2c\0\0\0\0" + struct.pack("<HH", 64, 64) + b"\0"
    hidden = bytes((len(small),)) + small + b"\0"           # a frame to one reader, a sub-block to another
    return whole[:6] + struct.pack("<HH", 64, 64) + whole[10:frame] + b"\x21\xff\0" + hidden + whole[frame:]


def many_sub_blocks() -> bytes:
    """A GIF with a million sub-blocks of one byte before its frame."""
    whole = _saved(Image.new("P", (64, 64)), "GIF")
    frame = whole.index(b"\x2c\0\0\0\0", 13)
    return whole[:frame] + b"\x21\xff\x0bNETSCAPE2.0" + b"\x01\0" * SUB_BLOCKS + b"\0" + whole[frame:]


def one_pixel_runs() -> bytes:
    """A run-length BMP whose every run is one pixel long."""
    pixels = b"\x01\0\x01\1" * (RUNS // 2) + b"\0\1"
    header = struct.pack("<IiiHHIIiiII", 40, 4_000, 4_000, 1, 8, 1, len(pixels), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 14 + 40 + 1024 + len(pixels), 0, 0, 14 + 40 + 1024) + header + bytes(
        1024) + pixels


def not_an_image() -> bytes:
    """Noise after a JPEG's first bytes."""
    return b"\xff\xd8\xff\xe0" + random.Random(7).randbytes(20_000)


def _saved(image: Image.Image, form: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


IMAGES: dict[str, Callable[[], bytes]] = {
    "JPEG of 3,000 scans": many_scans, "JPEG of 60,000 segments": many_segments, "PNG with two headers": two_headers,
    "PNG with another chunk first": header_not_first, "GIF with an empty sub-block": empty_sub_block,
    "GIF of a million sub-blocks": many_sub_blocks, "BMP of one-pixel runs": one_pixel_runs, "noise": not_an_image}


def image_bodies() -> dict[str, bytes]:
    """File name -> chat request with that file."""
    found = {}
    for name, make in IMAGES.items():
        url = "data:image/png;base64," + base64.b64encode(make()).decode()
        found[name] = chat([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}])
    return found


def json_bodies() -> dict[str, bytes]:
    """Chat requests that are only large or deeply nested."""
    return {"text of 10 MB": chat("many words " * 900_000),
            "100,000 brackets": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "200,000 parts": chat([{"type": "text", "text": "a"}] * 200_000 + [{"type": "nothing"}]),
            "200,000 unknown fields": json.dumps({str(number): number for number in range(200_000)}).encode(),
            "no JSON": b"\x00\xff" * 50_000}


def chat(content: object, **fields: object) -> bytes:
    """A request with one message."""
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()
