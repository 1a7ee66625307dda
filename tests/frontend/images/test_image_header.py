"""Sizes from headers, against Pillow's, and of files with wrong sizes or that end early."""

from __future__ import annotations

import io
import struct
import time
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin

from epdd.errors import MediaError
from epdd.frontend.images import image_header

from tests.frontend.http import hostile

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


def save(size: tuple[int, int], form: str, mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, 0).save(file, form, **options)
    return file.getvalue()


def upright(data: bytes) -> tuple[int, int]:
    """Pillow's result."""
    with Image.open(io.BytesIO(data)) as image:
        turned = ImageOps.exif_transpose(image)
        assert turned is not None
        return turned.size


def size_of(data: bytes) -> tuple[int, int]:
    return image_header.read(data).upright


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    tags[0x010F] = "a maker"
    return tags.tobytes()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (24, 16), (3, 700), (1200, 7)])
def test_plain_sizes(form: str, size: tuple[int, int]) -> None:
    assert size_of(save(size, form)) == size


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(0, 10))
def test_orientation_as_pillow(form: str, orientation: int) -> None:
    data = save((24, 16), form, exif=exif(orientation))
    assert size_of(data) == upright(data)
    assert size_of(data) == ((16, 24) if 5 <= orientation <= 8 else (24, 16))


@pytest.mark.parametrize("options", [
    {"progressive": True}, {"optimize": True}, {"comment": b"\xff\xd9" * 40}, {"icc_profile": b"\xff\xc0" * 9000},
])
def test_jpeg_kinds(options: dict[str, object]) -> None:
    assert size_of(save((31, 17), "JPEG", **options)) == (31, 17)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_jpeg_modes(mode: str) -> None:
    assert size_of(save((31, 17), "JPEG", mode)) == (31, 17)


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 10}, {"lossless": True, "exif": exif(6)}])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_webp_kinds(mode: str, options: dict[str, object]) -> None:
    data = save((33, 9), "WEBP", mode, **options)
    assert size_of(data) == upright(data)


def test_orientation_by_xmp_alone() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    for form in ("JPEG", "WEBP"):
        data = save((24, 16), form, xmp=xmp)
        assert size_of(data) == upright(data) == (16, 24)


@pytest.mark.parametrize("damage", [b"Exif\0\0", b"Exif\0\0II*\0", b"Exif\0\0II*\0\xff\xff\xff\xff",
                                    b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12", b"Exif\0\0nonsense"])
def test_malformed_exif_is_ignored(damage: bytes) -> None:
    clean = save((24, 16), "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", len(damage) + 2) + damage
    assert size_of(clean[:2] + segment + clean[2:]) == (24, 16)


def test_animations_have_the_size_of_their_first_frame() -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "green", "blue")]
    for form in ("GIF", "WEBP", "PNG"):
        file = io.BytesIO()
        frames[0].save(file, form, save_all=True, append_images=frames[1:])
        assert size_of(file.getvalue()) == (20, 10)


def test_a_gif_frame_larger_than_the_screen_counts() -> None:
    data = bytearray(save((50, 40), "GIF"))
    data[6:10] = struct.pack("<HH", 1, 1)
    assert size_of(bytes(data)) == upright(bytes(data)) == (50, 40)


def test_a_bmp_from_the_top() -> None:
    data = bytearray(save((6, 5), "BMP"))
    data[22:26] = struct.pack("<i", -5)
    assert size_of(bytes(data)) == upright(bytes(data)) == (6, 5)


def bomb(side: int) -> bytes:
    """A real, tiny PNG of side x side pixels."""
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = zlib.compress(bytes((side + 7) // 8 + 1) * 100)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
            + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


def test_enormous_claims_cost_nothing() -> None:
    started = time.process_time()
    assert size_of(bomb(20_000)) == (20_000, 20_000)
    assert time.process_time() - started < 0.05


@pytest.mark.parametrize(("data", "code"), [
    (b"", "empty_image_file"),
    (b"hello", "invalid_image_format"),
    (b"<?xml version='1.0'?><note>", "invalid_image_format"),
    (b"\xff\xd8\xff", "image_parse_error"),
    (b"\x89PNG\r\n\x1a\n", "image_parse_error"),
    (b"GIF89a\x01", "image_parse_error"),
    (b"BM", "image_parse_error"),
    (b"RIFF\0\0\0\0WEBPXXXX" + bytes(40), "image_parse_error"),
])
def test_no_images(data: bytes, code: str) -> None:
    with pytest.raises(MediaError) as caught:
        size_of(data)
    assert caught.value.code == code
    assert "0x" not in caught.value.message


def test_a_png_side_of_zero_is_damage() -> None:
    data = bytearray(save((4, 4), "PNG"))
    data[16:20] = bytes(4)
    with pytest.raises(MediaError) as caught:
        size_of(bytes(data))
    assert caught.value.code == "image_parse_error"


@pytest.mark.parametrize(("data", "words"), [
    (hostile.scans(64, 64, 501), "over 500 scans"),
    (hostile.scans(8000, 7998, 24), "over 23 scans"),
    (hostile.scans(64, 64, 501, hostile.segment(0xE5, hostile.END)), "over 500 scans"),     # an end that is none
    (hostile.scans(64, 64, 20, hostile.segment(0xFE) * 300), "segments between its scans"),
    (hostile.jpeg(before=hostile.segment(0xFE) * 5000), "segments before its pixels"),
    (hostile.jpeg(before=hostile.segment(0xE1, b"Exif\0\0" + bytes(9)) * 65), "64 segments of EXIF"),
    (hostile.png(8, 8, hostile.chunk(b"abCd") * 33_000), "32768 chunks"),
    (hostile.png(8, 8, hostile.chunk(b"IDAT") * 33_000), "32768 chunks"),
    (hostile.arithmetic(8000, 7998, 16), "3 arithmetic-coded scans or more"),
    (hostile.arithmetic(64, 64, 501), "501 arithmetic-coded scans or more"),
    (save((8, 8), "WEBP", exif=exif(6)) + b"abcd\0\0\0\0" * 33_000, "32768 chunks"),
    (hostile.sub_blocks(70_000), "65536 blocks"),
    (hostile.run_length(4000, 4000, b"\1\1\0\0"), "run-length"),
    (hostile.run_length(100, 1100, b"\1\1" * 1000 + b"\0\0"), "run-length"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_files_that_take_too_long_to_decode(data: bytes, words: str) -> None:
    with pytest.raises(MediaError, match=words) as caught:
        image_header.read(data)
    assert caught.value.code == "image_too_large"


@pytest.mark.parametrize("data", [
    hostile.two_headers(64, 13000), hostile.two_headers(13000, 64), hostile.another_chunk_first(64, 13000),
    hostile.two_frames(64, 9000), hostile.two_frames(9000, 64), hostile.png(8, 8, hostile.png_header(9, 9)),
    hostile.PNG + hostile.chunk(b"IHDR", bytes(12)) + hostile.png_pixels(8, 8)], ids=range(7))
def test_headers_with_two_sizes(data: bytes) -> None:
    with pytest.raises(MediaError) as caught:
        image_header.read(data)
    assert caught.value.code == "image_parse_error"


@pytest.mark.parametrize("data", [
    hostile.jpeg(progressive=True), hostile.scans(24, 16, 500),
    hostile.jpeg(progressive=True, behind=b"film" + b"\xff\xda\0\x0c" * 5000),     # a motion photo's
    hostile.jpeg(before=hostile.segment(0xE1, b"Exif\0\0" + b"\xff\xda" * 3000)),     # a preview's
    hostile.jpeg(before=hostile.segment(0xE2, bytes(65000)) * 300), hostile.jpeg(before=hostile.overlapping_exif(9)),
    hostile.png(24, 16, hostile.chunk(b"IDAT") * 30_000), hostile.run_length(24, 16, b"\x18\1\0\0"),
    hostile.arithmetic(24, 16, 500), hostile.png(24, 16, hostile.chunk(b"iCCP", b"a\0\0") * 30_000)], ids=range(10))
def test_odd_files_that_are_soon_decoded(data: bytes) -> None:
    assert size_of(data) == (24, 16)


MAGIC = st.sampled_from([b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBPVP8X", b"RIFF\0\0\0\0WEBPVP8 ",
                         b"RIFF\0\0\0\0WEBPVP8L", b"GIF89a", b"BM"])


@given(MAGIC, st.binary(max_size=300))
@settings(max_examples=500, deadline=None)
def test_any_bytes_give_a_size_or_a_fault(magic: bytes, rest: bytes) -> None:
    try:
        width, height = size_of(magic + rest)
    except MediaError as error:
        assert error.code in ("image_parse_error", "invalid_image_format", "unsupported_image_media_type")
    else:
        assert width > 0 and height > 0


@given(st.sampled_from(FORMATS), st.integers(0, 400), st.binary(min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_damaged_files_give_a_size_or_a_fault(form: str, at: int, change: bytes) -> None:
    data = bytearray(save((40, 30), form))
    data[at:at + len(change)] = change
    try:
        size_of(bytes(data[:400]))
    except MediaError as error:
        assert error.code


@pytest.mark.parametrize("hostile", [
    b"\xff\xd8\xff" + b"\xff" * 3_000_000, b"\xff\xd8\xff\xd0" * 800_000, b"\xff\xd8\xff\x01" + b"\0" * 3_000_000,
    b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 5, 5) + bytes(9) + b"\0\0\0\0abcd\0\0\0\0" * 250_000,
    b"GIF89a" + struct.pack("<HHBBB", 5, 5, 0, 0, 0) + b"!\xfe\0" * 1_000_000,
])
def test_hostile_files_take_no_time(hostile: bytes) -> None:
    started = time.process_time()
    try:
        size_of(hostile)
    except MediaError:
        pass
    assert time.process_time() - started < 0.5


def test_a_late_exif_chunk_is_obeyed() -> None:
    info = PngImagePlugin.PngInfo()
    data = save((24, 16), "PNG", pnginfo=info)
    body = exif(6)[6:]
    late = struct.pack(">I4s", len(body), b"eXIf") + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    assert size_of(data[:-12] + late + data[-12:]) == upright(data[:-12] + late + data[-12:]) == (16, 24)


def test_agrees_with_the_encoder() -> None:
    from epdd.worker.vision.decode_image import decode

    for form in FORMATS:
        for orientation in (1, 3, 6):
            options = {"exif": exif(orientation)} if form in ("JPEG", "PNG", "WEBP") else {}
            data = save((37, 19), form, **options)
            header = image_header.read(data)
            assert decode(data, (header.width, header.height), header.orientation).shape[1::-1] == size_of(data)
