"""Image files of the cases, built byte by byte if no library writes them."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from functools import cache
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {"red": (230, 20, 20), "green": (20, 160, 40), "blue": (20, 40, 230), "white": (255, 255, 255)}


def file(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


@cache
def circle(colour: str = "red", size: int = 96) -> bytes:
    """A circle on white, which the demo model can name."""
    image = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(image).ellipse((size // 8, size // 8, size - size // 8, size - size // 8), fill=COLOURS[colour])
    return file(image)


def plain(colour: str | tuple[int, ...], size: tuple[int, int] = (64, 64), form: str = "PNG", mode: str = "RGB",
          **options: Any) -> bytes:
    return file(Image.new(mode, size, colour), form, **options)


def noise(width: int, height: int, seed: int = 0, form: str = "PNG", **options: Any) -> bytes:
    """An incompressible picture."""
    return file(Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)), form,
                **options)


def photo(form: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (160, 120), **options: Any) -> bytes:
    """A picture with gradients in both directions, which shows every rotation, shift or clipped level."""
    width, height = size
    image = Image.new("RGB", size)
    image.putdata([(255 * x // width, 255 * y // height, 255 * (x + y) // (width + height))
                   for y in range(height) for x in range(width)])
    return file(image.convert(mode), form, **options)


def turned(orientation: int | bytes) -> bytes:
    """A phone's photo: stored rotated, with a red bar on the left and a green one at the bottom, and EXIF."""
    image = Image.new("RGB", (24, 16), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, 5, 15), fill="red")
    draw.rectangle((0, 12, 23, 15), fill="green")
    if isinstance(orientation, bytes):
        return file(image, "JPEG", quality=95, exif=orientation)
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file(image, "JPEG", quality=95, exif=exif)


def palette() -> bytes:
    """Every pixel is index 1: green by the palette, transparent by tRNS."""
    image = Image.new("P", (64, 64), 1)
    image.putpalette([0, 0, 0, 0, 255, 0])
    return file(image, transparency=b"\xff\x00")


def deep_ramp() -> bytes:
    """256 x 256 grey of 16 bits, from 0 to 65535."""
    return png(256, 256, 16, 0, b"".join(b"\0" + struct.pack(">256H", *range(row * 256, row * 256 + 256))
                                         for row in range(256)))


def bomb(side: int) -> bytes:
    """A black square of one bit a pixel: kilobytes that decompress to hundreds of megabytes."""
    row = bytes(1 + (side + 7) // 8)
    packer = zlib.compressobj(9)
    return _png(side, side, 1, 0, b"".join(packer.compress(row * 100) for _ in range(side // 100)) + packer.flush())


def png(width: int, height: int, depth: int, colour_type: int, rows: bytes) -> bytes:
    return _png(width, height, depth, colour_type, zlib.compress(rows))


def _png(width: int, height: int, depth: int, colour_type: int, packed: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    head = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def animated(form: str) -> bytes:
    """Three frames: red, green, blue."""
    red, *rest = (Image.new("RGB", (64, 64), colour) for colour in ("red", "lime", "blue"))
    return file(red, form, save_all=True, append_images=rest, duration=100)


def long_gif(frames: int) -> bytes:
    """A red square in every frame."""
    first = plain("red", (64, 64), "GIF", "RGB")
    head, body = first[:-1], first[first.index(b"\x2c"):-1]     # without the end mark; the frame alone
    return head + body * (frames - 1) + b";"


def url(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


def part(image: bytes | str) -> dict[str, Any]:
    """An image of a message, from a file's bytes or a URL."""
    return {"type": "image_url", "image_url": {"url": image if isinstance(image, str) else url(image)}}
