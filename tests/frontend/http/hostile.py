"""Image files that need far more work or memory than their size suggests, or that decoders read in two ways."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image

PNG = b"\x89PNG\r\n\x1a\n"
END = b"\xff\xd9"


def chunk(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_header(width: int, height: int) -> bytes:
    """Of one bit a pixel."""
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))


def png_pixels(width: int, height: int) -> bytes:
    """Black, and the end."""
    return chunk(b"IDAT", zlib.compress(bytes(height * (1 + (width + 7) // 8)))) + chunk(b"IEND")


def png(width: int, height: int, before: bytes = b"", first: bytes = b"") -> bytes:
    """With other chunks `first` of all, and `before` the pixels."""
    return PNG + first + png_header(width, height) + before + png_pixels(width, height)


def two_headers(said: int, made: int) -> bytes:
    """A PNG whose first header has another size than the header that decoders use."""
    return png(made, made, first=png_header(said, said))


def another_chunk_first(said: int, made: int) -> bytes:
    """A PNG with a wrong size at the place where the header usually is."""
    return png(made, made, first=chunk(b"abCd", struct.pack(">II", said, said) + bytes(5)))


def gif_of(width: int, height: int) -> tuple[bytes, bytes]:
    """The screen with its colours, and the rest from the first frame on."""
    file = io.BytesIO()
    Image.new("L", (width, height), 7).save(file, "GIF")
    data = file.getvalue()
    start = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    return data[:start], data[data.index(b"\x2c", start):]


def empty_sub_block(said: int, made: int) -> bytes:
    """A GIF with an empty application extension, after which Pillow reads another sub-block, over the frame."""
    screen, frame = gif_of(made, made)
    small = b"\x2c" + struct.pack("<HHHHB", 0, 0, said, said, 0)        # to Pillow a sub-block of 44 bytes
    screen = screen[:6] + struct.pack("<HH", said, said) + screen[10:]
    return screen + b"\x21\xff\0" + small.ljust(45, b"\0") + b"\0" + frame


def sub_blocks(count: int) -> bytes:
    """A GIF with a comment of so many bytes, each in a block of its own."""
    screen, frame = gif_of(8, 8)
    return screen + b"\x21\xfe" + b"\1a" * count + b"\0" + frame


def segment(marker: int, body: bytes = b"") -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def scans(width: int, height: int, count: int, between: bytes = b"") -> bytes:
    """A grey progressive JPEG with `count` empty scans."""
    blocks = -(-width // 8) * -(-height // 8)
    data = bytearray(b"\xff\xd8" + segment(0xDB, b"\0" + b"\1" * 64)
                     + segment(0xC2, struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0")
                     + segment(0xC4, b"\0\1" + bytes(15) + b"\0")           # "0": a difference of 0
                     + segment(0xC4, b"\x10\1" + bytes(15) + b"\xe0")       # "0": this block and up to 32,766 more end
                     + segment(0xDA, b"\1\1\0\0\0\0") + bytes(-(-blocks // 8)))
    bits, left = "", blocks
    while left:
        run = min(left, (1 << 15) - 1)
        if run < 1 << 14:           # the code covers at least this many blocks; the last ones may come twice
            run = min(left, 1 << 14)
        bits += "0" + format(run - (1 << 14) if run >= 1 << 14 else 0, "014b")
        left -= run
    bits += "1" * (-len(bits) % 8)
    scan = segment(0xDA, b"\1\1\0\1\x3f\0") + int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return bytes(data + (between + scan) * (count - 1) + END)


def arithmetic(width: int, height: int, count: int) -> bytes:
    """An arithmetic-coded JPEG with `count` scans; after the bytes' end its decoder reads zeros."""
    def scan(*components: int) -> bytes:
        return segment(0xDA, bytes([len(components), *(byte for each in components for byte in (each, 0)), 0, 63, 0])
                       ) + b"\x1b\x2c\x4d\x5e"

    frame = struct.pack(">BHHB", 8, height, width, 3) + b"\1\x11\0\2\x11\0\3\x11\0"
    return (b"\xff\xd8" + segment(0xDB, b"\0" + b"\1" * 64) + segment(0xC9, frame) + scan(3)
            + scan(1, 2) * (count - 1) + END)


def jpeg(width: int = 24, height: int = 16, before: bytes = b"", behind: bytes = b"", **options: object) -> bytes:
    """With `before` behind its start, and `behind` its end."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "JPEG", **options)
    data = file.getvalue()
    return data[:2] + before + data[2:] + behind


def two_frames(said: int, other: int) -> bytes:
    """A JPEG with one more start of frame, of another size."""
    data = jpeg(said, said)
    start = data.index(b"\xff\xc0")
    end = start + 2 + int.from_bytes(data[start + 2:start + 4], "big")
    second = data[start:start + 5] + struct.pack(">HH", other, other) + data[start + 9:end]
    return data[:end] + second + data[end:]


def overlapping_exif(tags: int) -> bytes:
    """A segment of EXIF data whose tags all point at the same bytes."""
    size = 65535 - 2 - 6 - 8 - 2 - 12 * tags
    entries = b"".join(struct.pack(">HHII", 0x8000 + tag, 7, size, 10 + 12 * tags) for tag in range(tags))
    return segment(0xE1, b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", tags) + entries + bytes(size))


def run_length(width: int, height: int, row: bytes) -> bytes:
    """A BMP of 8 bits a pixel whose rows are each so compressed."""
    colours, body = bytes(1024), row * height + b"\0\1"
    start = 14 + 40 + len(colours)
    return (b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start)
            + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(body), 0, 0, 256, 0) + colours + body)
