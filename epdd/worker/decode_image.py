"""Image bytes to upright RGB pixels.

Owns everything that hides in files: formats, orientation, transparency, depth, frames.  Knows no model.
All fault texts are fixed: a library's message may hold addresses or parts of the file.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Callable

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from epdd.errors import MediaError

Pixels = NDArray[np.uint8]      # [height, width, 3]

# Clients' files must not fill the log; what is wrong with them is said by the error.
warnings.filterwarnings("ignore", module=r"PIL\.")

ORIENTATION_TAG = 0x0112
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


def decode(data: bytes) -> Pixels:
    """The first frame of an image file, upright, on white.

    Raises MediaError if the bytes are not one of the five formats, or damaged, or cut off.  The daemon has
    bounded the pixel count by the header; Pillow's own bound stands behind it.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=[sniff(data)])
    except Image.DecompressionBombError:
        raise MediaError("the image has too many pixels", code="image_too_large") from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, struct.error, EOFError, KeyError):
        raise MediaError("the image's header cannot be read", code="image_parse_error") from None
    try:
        pixels = _fast_jpeg(image, data)
        if pixels is None:
            pixels = np.asarray(_as_rgb(image))
    except MemoryError:     # ours to answer for: how many pixels a file may have was checked long before
        raise
    except Exception:  # a decoder may raise anything at all on hostile bytes
        raise MediaError("the image's pixels cannot be decoded", code="image_parse_error") from None
    turn = _TURNS.get(_orientation(image))
    return turn(pixels) if turn else pixels


def sniff(data: bytes) -> str:
    """Pillow's name of the format by the first bytes; labels are never trusted.  Raises MediaError."""
    if data[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if data[:2] == b"BM":
        return "BMP"
    raise MediaError("the bytes are no JPEG, PNG, WebP, GIF or BMP image", code="invalid_image_format")


def _fast_jpeg(image: Image.Image, data: bytes) -> Pixels | None:
    """libjpeg-turbo's own pixels, equal to Pillow's; None where it refuses or another format needs Pillow."""
    if image.format != "JPEG" or image.mode not in ("RGB", "L"):
        return None
    try:
        decoded: Pixels = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:
        return None
    return decoded


def _orientation(image: Image.Image) -> int:
    """1 to 8.  To be asked when the pixels are loaded: a PNG's EXIF may follow them."""
    try:
        value = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # malformed EXIF is ignored, whatever it makes the parser raise
        return 1
    return value if isinstance(value, int) else 1


def _as_rgb(image: Image.Image) -> Image.Image:
    """Eight bits a channel, three channels, no transparency."""
    image.load()
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
