"""Formats by their first bytes: supported, known but not supported, and no image."""

from __future__ import annotations

import io
import struct

import pytest
from PIL import Image, features

from epdd.errors import IMAGE_CODES, MediaError
from epdd.frontend.images import image_format


def box(*brands: bytes) -> bytes:
    body = b"ftyp" + brands[0] + bytes(4) + b"".join(brands[1:])
    return struct.pack(">I", 4 + len(body)) + body + bytes(16)


def saved(form: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(file, form)
    return file.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_formats_that_are_taken(form: str) -> None:
    assert image_format.of(saved(form)) == form


@pytest.mark.parametrize(("data", "name"), [
    ("TIFF", "TIFF"), ("ICO", "ICO"), ("PDF", "PDF"), ("PPM", "Netpbm"), ("EPS", "PostScript"), ("DDS", "DDS"),
    ("JPEG2000", "JPEG 2000"), ("AVIF", "AVIF"),
    (b"MM\0*" + bytes(20), "TIFF"), (b"II+\0" + bytes(20), "BigTIFF"), (box(b"avif", b"mif1"), "AVIF"),
    (box(b"mif1", b"mif1", b"heic"), "HEIC"), (box(b"mif1", b"avif"), "AVIF"), (box(b"mif1"), "HEIF"),
    (box(b"heic", b"mif1"), "HEIC"), (box(b"isom", b"mp42"), "MPEG-4 video"), (box(b"qt  "), "QuickTime"),
    (b"\xff\x0a" + bytes(20), "JPEG XL"), (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"\xff\x4f\xff\x51\0", "JPEG 2000"), (b"\xff\xd8\xff\xf7\0", "JPEG-LS"),
    (b"<svg xmlns=\"http://www.w3.org/2000/svg\"></svg>", "SVG"), (b"\xef\xbb\xbf\n<SVG>", "SVG"),
    (b"<?xml version=\"1.0\"?><!-- made --><!DOCTYPE svg><svg>", "SVG"), (b"  <!-- a --> <svg/>", "SVG"),
    (b"%PDF-1.7", "PDF"), (b"8BPS\0\1", "Photoshop"),
    (b"RIFF\0\0\0\0AVI LIST", "AVI video"), (b"\x1aE\xdf\xa3", "WebM"), (b"OggS", "Ogg"), (b"PK\3\4", "ZIP"),
    (b"\x1f\x8b\x08", "gzip"), (b"qoif", "QOI"), (b"P6\n2 2\n255\n", "Netpbm"), (b"v/1\1", "OpenEXR"),
])
def test_formats_that_are_only_known(data: bytes | str, name: str) -> None:
    if isinstance(data, str):
        if not features.check({"AVIF": "avif", "JPEG2000": "jpg_2000", "TIFF": "libtiff"}.get(data, "pil")):
            pytest.skip(f"this Pillow writes no {data}")
        data = saved(data)
    with pytest.raises(MediaError) as caught:
        image_format.of(data)
    error = caught.value
    assert error.code == "unsupported_image_media_type" and error.code in IMAGE_CODES and error.status == 400
    assert f"the format {name}" in error.message or name in error.message.split(",")[0]
    assert error.message.endswith("send JPEG, PNG, WebP, GIF or BMP")


@pytest.mark.parametrize("data", [b"hello", b"\0" * 40, b"<note>", b"<?xml version='1.0'?><note/>", b"RIFF\0\0\0\0ABCD",
                                  b"P\n", b"{}", b"\x89PNG", b"GIF"])
def test_no_image_at_all(data: bytes) -> None:
    with pytest.raises(MediaError) as caught:
        image_format.of(data)
    assert caught.value.code == "invalid_image_format"
    assert caught.value.message == "The image is in no known format; send JPEG, PNG, WebP, GIF or BMP"


@pytest.mark.parametrize("data", [b"<!DOCTYPE html><html>", b"<html lang=en>", b"\n<HTML>"])
def test_pages_of_errors_are_named(data: bytes) -> None:
    with pytest.raises(MediaError, match="HTML page") as caught:
        image_format.of(data)
    assert caught.value.code == "invalid_image_format"
