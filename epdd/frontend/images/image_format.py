"""An image file's format, by its first bytes: labels and file names are often wrong."""

from __future__ import annotations

import re

from epdd.errors import MediaError

SUPPORTED = "JPEG, PNG, WebP, GIF or BMP"

_BOXES = {      # brand of an ISO base media file's first box
    b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"heim": "HEIC", b"heis": "HEIC",
    b"hevc": "HEIC", b"hevx": "HEIC", b"mif1": "HEIF", b"msf1": "HEIF", b"crx ": "Canon CR3 raw", b"qt  ": "QuickTime",
    b"M4A ": "MPEG-4 audio",
}
_STARTS = (
    (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"II+\0", "BigTIFF"), (b"MM\0+", "BigTIFF"), (b"II\xbc\1", "JPEG XR"),
    (b"\xff\x0a", "JPEG XL"), (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"), (b"\xff\x4f\xff\x51", "JPEG 2000"), (b"\xff\xd8\xff\xf7", "JPEG-LS"),
    (b"%PDF-", "PDF"), (b"%!PS", "PostScript"), (b"\xc5\xd0\xd3\xc6", "EPS"),
    (b"\0\0\1\0", "ICO"), (b"\0\0\2\0", "CUR"), (b"8BPS", "Photoshop (PSD)"), (b"gimp xcf", "GIMP (XCF)"),
    (b"\x8aMNG\r\n\x1a\n", "MNG"), (b"\x8bJNG\r\n\x1a\n", "JNG"), (b"qoif", "QOI"), (b"DDS ", "DDS"),
    (b"\xabKTX ", "KTX"), (b"v/1\1", "OpenEXR"), (b"#?RADIANCE", "Radiance HDR"), (b"SIMPLE  =", "FITS"),
    (b"FLIF", "FLIF"), (b"BPG\xfb", "BPG"), (b"AT&TFORM", "DjVu"), (b"\xd7\xcd\xc6\x9a", "WMF"),
    (b"\x1aE\xdf\xa3", "Matroska or WebM video"), (b"FLV\1", "Flash video"), (b"\0\0\1\xba", "MPEG video"),
    (b"\0\0\1\xb3", "MPEG video"), (b"OggS", "Ogg"), (b"ID3", "MP3 audio"), (b"fLaC", "FLAC audio"),
    (b"PK\3\4", "ZIP archive"), (b"\x1f\x8b", "gzip archive"), (b"\x28\xb5\x2f\xfd", "Zstandard archive"),
)
_NETPBM = re.compile(rb"P[1-7f][ \t\r\n]")
_MARKUP = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(svg|html|!doctype (?:svg|html))?", re.IGNORECASE)
_LOOK = 4096                # bytes in which an SVG's first element is sought, after its comments


def of(data: bytes) -> str:
    """"JPEG", "PNG", "WEBP", "GIF" or "BMP".

    Raises MediaError: unsupported_image_media_type, naming the format, for one that is known but not decoded;
    invalid_image_format for anything else.
    """
    known = _known(data)
    # JPEG-LS begins as a JPEG does, but libjpeg refuses it.
    if known is None and data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"BM"):
        return "BMP"
    if known == "HTML":         # often an error page of the image's host
        raise MediaError(f"The file is an HTML page, not an image; send {SUPPORTED}", code="invalid_image_format")
    if known is not None:
        raise MediaError(f"The file is in the format {known}, which is not supported; send {SUPPORTED}",
                         code="unsupported_image_media_type")
    raise MediaError(f"The image is in no known format; send {SUPPORTED}", code="invalid_image_format")


def _known(data: bytes) -> str | None:
    """The name of a format that epdd does not decode."""
    for start, name in _STARTS:
        if data.startswith(start):
            return name
    if data[4:8] == b"ftyp":
        return _box(data)
    if data.startswith(b"RIFF") and data[8:12] in (b"AVI ", b"WAVE"):
        return "AVI video" if data[8:12] == b"AVI " else "WAVE audio"
    if _NETPBM.match(data):
        return "Netpbm (PBM, PGM, PPM, PAM)"
    return _markup(data[:_LOOK])


def _box(data: bytes) -> str:
    """The brands `mif1` and `msf1` mean any picture; the compatible brands say which kind."""
    brands = [data[at:at + 4] for at in (8, *range(16, min(int.from_bytes(data[:4], "big"), 256), 4))]
    names = [_BOXES[brand] for brand in brands if brand in _BOXES]
    return next((name for name in names if name != "HEIF"), names[0] if names else "MPEG-4 video")


def _markup(head: bytes) -> str | None:
    found = _MARKUP.match(head)
    if found is None:
        return None
    if b"<svg" in head.lower() or b"<!doctype svg" in head.lower():
        return "SVG"
    return "HTML" if (found[1] or b"").lower().endswith(b"html") else None
