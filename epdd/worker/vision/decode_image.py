"""Image bytes to upright RGB pixels.

Owns everything that hides in files: formats, orientation, transparency, depth, frames.  Knows no model.
All fault texts are fixed: a library's message may hold addresses or parts of the file.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from epdd.errors import MediaError

Pixels = NDArray[np.uint8]      # [height, width, 3]

# Clients' files must not fill the log; the error says what is wrong with them.
warnings.filterwarnings("ignore", module=r"PIL\.")

JPEG_TABLES_MAX = 16            # segments of them: Pillow reads each table in Python
PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT")     # chunks that pixels depend on
STEP_PIXELS = 1 << 20           # converted at once
PNG_START = b"\x89PNG\r\n\x1a\n"
WHITE = (255, 255, 255)         # what lies behind transparent pixels; part of the daemon's cache key

_TURNS: dict[int, Callable[[Pixels], Pixels]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: pixels.transpose(1, 0, 2)[:, ::-1],
    7: lambda pixels: pixels.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda pixels: pixels.transpose(1, 0, 2)[::-1],
}


def decode(data: bytes, size: tuple[int, int], orientation: int = 1) -> Pixels:
    """The first frame of an image file, turned upright from `orientation` (EXIF's), on white.

    `size` is the width and height, as stored, that the daemon found in the header and holds to its limits.
    Raises MediaError if the bytes are not one of the five formats, or damaged, or cut off, or if the decoder is about
    to make pixels of another size.
    """
    form = sniff(data)
    try:
        pixels = _fast_jpeg(data, size) if form == "JPEG" else None
        if pixels is None:
            pixels = _by_pillow(_BARE.get(form, bytes)(data), form, size)
    except (MediaError, MemoryError):   # if memory runs out, the fault is ours: the pixels were counted before
        raise
    except Exception:  # a decoder may raise anything at all on hostile bytes
        raise MediaError("the image's pixels cannot be decoded", code="image_parse_error") from None
    turn = _TURNS.get(orientation)
    return turn(pixels) if turn else pixels


def sniff(data: bytes) -> str:
    """Pillow's name of the format by the first bytes; labels are never trusted.  Raises MediaError."""
    if data[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if data.startswith(PNG_START):
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if data[:2] == b"BM":
        return "BMP"
    raise MediaError("the bytes are no JPEG, PNG, WebP, GIF or BMP image", code="invalid_image_format")


def _fast_jpeg(data: bytes, size: tuple[int, int]) -> Pixels | None:
    """libjpeg-turbo's own pixels, equal to Pillow's; None where it refuses or the colours need Pillow."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    _check_size((int(width), int(height)), size)
    if colours in ("CMYK", "YCCK"):
        return None
    try:
        decoded: Pixels = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:
        return None
    return decoded


def _bare_jpeg(data: bytes) -> bytes:
    """A JPEG with nothing before its first scan but what its pixels depend on.

    Pillow reads the rest in Python: a file of 64 KB can make it spend 300 MB on EXIF tags that lie over one another.
    Raises ValueError, IndexError, struct.error for a damaged file.
    """
    at, kept, tables = 2, [data[:2]], 0
    while True:
        at = data.index(b"\xff", at)
        marker = data[at + 1]
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD7:      # fill, or a marker without a body
            at += 1 if marker == 0xFF else 2
            continue
        if 0xD8 <= marker <= 0xDA:
            return b"".join(kept) + data[at:]
        length, = struct.unpack_from(">H", data, at + 2)
        tables += marker == 0xDB
        if tables > JPEG_TABLES_MAX:
            raise ValueError
        # JFIF's and Adobe's segments name the colours.
        if marker in (0xE0, 0xEE) or marker != 0xFE and not 0xE0 <= marker <= 0xEF:
            kept.append(data[at:at + 2 + length])
        at += 2 + length


def _bare_png(data: bytes) -> bytes:
    """A PNG with nothing but what its pixels depend on: those of IDAT, whatever frames there are besides.

    Pillow unpacks compressed texts: a chunk of 1 KB to 1 MB, and not all of them count for its limit.
    """
    at, kept = len(PNG_START), [PNG_START]
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            kept.append(data[at:])
            break
        if kind in PNG_KEPT:
            kept.append(data[at:at + 12 + length])
        at += 12 + length
    return b"".join(kept)


_BARE: dict[str, Callable[[bytes], bytes]] = {"JPEG": _bare_jpeg, "PNG": _bare_png}


def _by_pillow(data: bytes, form: str, size: tuple[int, int]) -> Pixels:
    """Pillow's pixels.  Raises MediaError, and whatever Pillow does."""
    try:
        with _pixels_max(size[0] * size[1]):
            image = Image.open(io.BytesIO(data), formats=[form])
            _check_size(image.size, size)
            return _pixels(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _another_size() from None
    except UnidentifiedImageError:
        raise MediaError("the image's header cannot be read", code="image_parse_error") from None


@contextmanager
def _pixels_max(count: int) -> Iterator[None]:
    """Inside, Pillow refuses images of over twice as many: it makes some pixels before it reports the size.

    The limit is the process's: there is one thread that decodes.
    """
    usual, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, count
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = usual


def _check_size(found: tuple[int, int], said: tuple[int, int]) -> None:
    if tuple(found) != tuple(said):
        raise _another_size()


def _another_size() -> MediaError:
    return MediaError("the image's pixels have another size than its header says", code="image_parse_error")


def _pixels(image: Image.Image) -> Pixels:
    """Converted some rows at a time: the whole at once would take up to four copies of it."""
    image.load()
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, STEP_PIXELS // width)
    for top in range(0, height, rows):
        below = min(top + rows, height)
        pixels[top:below] = np.asarray(_as_rgb(image.crop((0, top, width, below))))
    return pixels


def _as_rgb(image: Image.Image) -> Image.Image:
    """Eight bits a channel, three channels, no transparency."""
    if image.mode.startswith("I"):
        # Pillow's own conversion clips at 255 instead of scaling.
        depth = np.asarray(image)
        return Image.fromarray((np.clip(depth, 0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        background = Image.new("RGB", image.size, WHITE)
        background.paste(rgba, mask=rgba.getchannel("A"))
        return background
    return image.convert("RGB")
