from __future__ import annotations

import io
import struct
import time
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import assume, given, settings, strategies as st
from PIL import Image, ImageFile, ImageOps, PngImagePlugin

from epdd.errors import IMAGE_CODES, MediaError
from epdd.frontend.images import image_header
from epdd.worker.vision import decode_image
from epdd.worker.vision.decode_image import Pixels, decode, sniff
from tests.frontend.http import hostile
from tests.models.checkpoints import picture

TEXT = zlib.compress(bytes((1 << 20) - 1))


def pixels(data: bytes) -> Pixels:
    """Decoded by what the daemon finds in the header."""
    header = image_header.read(data)
    return decode(data, (header.width, header.height), header.orientation)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture(24, 16), "JPEG", exif=exif, quality=95)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_as_pillow_does(orientation: int) -> None:
    data = oriented(orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert upright is not None
    assert np.array_equal(pixels(data), np.asarray(upright))


def test_orientation_is_read_from_png_and_webp_too() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        found = pixels(encoded(picture(24, 16), kind, exif=exif, **options))
        assert np.array_equal(found, np.rot90(np.asarray(picture(24, 16)), -1))
    png = encoded(picture(24, 16), "PNG", exif=exif)
    start = png.index(b"eXIf") - 4
    end = start + 12 + struct.unpack(">I", png[start:start + 4])[0]
    late = png[:start] + png[end:-12] + png[start:end] + png[-12:]      # behind the pixels, before IEND
    assert np.array_equal(pixels(late), np.rot90(np.asarray(picture(24, 16)), -1))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
                                  b"Exif\0\0II*\0\xff\xff\xff\x7f", b"",
                                  b"Exif\0\0MM\0*\0\0\0\x08\0\1\x01\x12\0\3\0\0\0\1\0\x63\0\0\0\0\0\0"])
def test_malformed_exif_is_ignored(exif: bytes) -> None:
    plain = encoded(picture(24, 16), "JPEG", quality=95)
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    assert np.array_equal(pixels(plain[:2] + segment + plain[2:]), pixels(plain))


def test_palette_with_transparency_shows_white_not_the_hidden_colour() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([255, 0, 0, 0, 255, 0])
    data = encoded(image, "PNG", transparency=b"\xff\x00")
    assert (pixels(data) == 255).all()


def test_transparent_pixels_become_white_and_half_transparent_ones_blend() -> None:
    assert (pixels(encoded(Image.new("RGBA", (64, 64), (255, 0, 0, 0)), "PNG")) == 255).all()
    half = pixels(encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 128)), "PNG"))
    assert (abs(half.astype(int) - 127) <= 1).all()
    assert (pixels(encoded(Image.new("LA", (4, 4), (10, 0)), "PNG")) == 255).all()
    assert (pixels(encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "WEBP", lossless=True, exact=True)) == 255).all()


def test_colour_key_transparency_of_an_rgb_png() -> None:
    image = Image.new("RGB", (4, 4), (1, 2, 3))
    image.putpixel((0, 0), (9, 9, 9))
    found = pixels(encoded(image, "PNG", transparency=(1, 2, 3)))
    assert found[0, 0].tolist() == [9, 9, 9] and (found[1:] == 255).all()


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 65536).astype(np.uint16).reshape(256, 256)
    found = pixels(encoded(Image.fromarray(ramp), "PNG"))
    assert np.array_equal(found, np.repeat((ramp >> 8).astype(np.uint8)[..., None], 3, 2))


def test_modes_all_end_as_three_channels() -> None:
    red = pixels(encoded(Image.new("CMYK", (64, 64), (0, 255, 255, 0)), "JPEG"))
    assert red.shape == (64, 64, 3) and (abs(red.astype(int) - [255, 0, 0]) <= 3).all()
    grey = pixels(encoded(Image.new("L", (20, 10), 77), "JPEG", quality=95))
    assert grey.shape == (10, 20, 3) and (abs(grey.astype(int) - 77) <= 1).all()
    assert pixels(encoded(Image.new("1", (5, 4), 1), "PNG")).tolist() == [[[255] * 3] * 5] * 4
    assert pixels(encoded(picture(9, 7), "BMP")).shape == (7, 9, 3)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("options", [{"quality": 90}, {"quality": 40, "subsampling": 2},
                                     {"quality": 95, "subsampling": 0}, {"quality": 80, "progressive": True}])
def test_jpeg_pixels_equal_pillows(mode: str, options: dict[str, Any]) -> None:
    data = encoded(picture(131, 77).convert(mode), "JPEG", **options)
    assert np.array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("size", [(1, 1), (22, 3), (3, 60), (1000, 5)])
def test_sides_of_three_pixels_are_no_channels(size: tuple[int, int]) -> None:
    for kind in ("PNG", "JPEG", "BMP"):
        assert pixels(encoded(picture(*size), kind)).shape == (size[1], size[0], 3)


def test_only_the_first_frame_counts_and_costs() -> None:
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "lime", "blue")]
    for kind in ("GIF", "PNG", "WEBP"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert (abs(pixels(data).astype(int) - [255, 0, 0]) <= 3).all(), kind
    many = [Image.new("L", (64, 64), i % 251) for i in range(1500)]
    data = encoded(many[0], "GIF", save_all=True, append_images=many[1:])
    begin = time.process_time()
    pixels(data)
    assert time.process_time() - begin < 0.2    # a walk over all frames takes many times as long


@pytest.mark.parametrize("cut", [1, 16, 128, 0.5])
def test_truncated_jpeg_is_refused(cut: float) -> None:
    data = encoded(picture(200, 150), "JPEG")
    end = len(data) - int(cut) if cut >= 1 else int(len(data) * cut)
    with pytest.raises(MediaError) as caught:
        pixels(data[:end])
    assert caught.value.code == "image_parse_error"


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_a_file_cut_in_half_is_refused_in_our_own_words(kind: str) -> None:
    data = encoded(picture(200, 150), kind)
    with pytest.raises(MediaError) as caught:
        pixels(data[:len(data) // 2])
    assert caught.value.code == "image_parse_error"
    assert caught.value.message in ("the image's header cannot be read", "the image's pixels cannot be decoded")


def test_bytes_decide_the_format_not_labels() -> None:
    assert [sniff(encoded(picture(8, 8), kind)) for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP")] == [
        "JPEG", "PNG", "WEBP", "GIF", "BMP"]
    for data in (b"hello", b"", b"II*\0" + bytes(64), encoded(picture(8, 8), "TIFF"), b"<svg></svg>", b"%PDF-1.7"):
        with pytest.raises(MediaError) as caught:
            decode(data, (8, 8))
        assert caught.value.code == "invalid_image_format"


def test_a_bomb_stops_at_the_header() -> None:
    header = struct.pack(">IIBBBBB", 20000, 20000, 1, 0, 0, 0, 0)
    chunks = PngImagePlugin._MAGIC
    file = io.BytesIO()
    file.write(chunks)
    PngImagePlugin.putchunk(file, b"IHDR", header)
    PngImagePlugin.putchunk(file, b"IDAT", b"x\x9c\x03\x00\x00\x00\x00\x01")
    PngImagePlugin.putchunk(file, b"IEND", b"")
    with pytest.raises(MediaError) as caught:
        decode(file.getvalue(), (200, 200))
    assert caught.value.code == "image_parse_error" and "another size" in caught.value.message


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("data", [
    hostile.two_headers(64, 13000), hostile.another_chunk_first(64, 13000), hostile.empty_sub_block(64, 13000),
    hostile.two_headers(640, 641), hostile.empty_sub_block(640, 641), hostile.two_frames(64, 65),
    encoded(picture(65, 64), "JPEG"), encoded(picture(64, 65), "JPEG", progressive=True),
    encoded(picture(64, 65).convert("CMYK"), "JPEG"), encoded(picture(65, 64), "BMP"), encoded(picture(65, 64), "WEBP"),
    encoded(picture(640, 640), "WEBP", lossless=True)], ids=range(12))
def test_no_pixel_is_made_of_a_size_that_the_daemon_did_not_see(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((simplejpeg, "decode_jpeg"), (Image.Image, "load"), (ImageFile.ImageFile, "load")):
        monkeypatch.setattr(module, name, lambda *arguments, **options: pytest.fail("pixels are made"))
    before = Image.MAX_IMAGE_PIXELS
    for size in ((64, 64), (640, 640)):
        if data.startswith(b"RIFF") and size == (640, 640):
            continue
        with pytest.raises(MediaError) as caught:
            decode(data, size)
        assert caught.value.code == "image_parse_error"
    assert Image.MAX_IMAGE_PIXELS == before


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_metadata_is_no_business_of_the_decoder() -> None:
    """Metadata that Pillow would parse in Python: overlapping EXIF tags, Photoshop resources, comments."""
    image = picture(40, 30).convert("CMYK")
    plain = encoded(image, "JPEG", quality=90)
    stuffed = plain[:2] + hostile.overlapping_exif(2700) + hostile.segment(
        0xED, b"Photoshop 3.0\0" + b"8BIM\4" + bytes(7)) * 200 + hostile.segment(0xFE, bytes(1000)) * 200 + plain[2:]
    tracemalloc.start()
    try:
        found = pixels(stuffed)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(stuffed)       # EXIF alone takes over 50 MB
    finally:
        tracemalloc.stop()
    assert np.array_equal(found, pixels(plain))
    assert np.array_equal(found, np.asarray(Image.open(io.BytesIO(plain)).convert("RGB")))
    with pytest.raises(MediaError):
        pixels(plain[:2] + hostile.segment(0xDB, (b"\0" + b"\1" * 64) * 1000) * 17 + plain[2:])


@pytest.mark.parametrize("text", [
    hostile.chunk(b"zTXt", b"\0\0" + TEXT), hostile.chunk(b"iTXt", b"k\0\1\0\xff\0k\0" + TEXT),
    hostile.chunk(b"zTXt", b"k\0\0" + TEXT), hostile.chunk(b"iCCP", b"k\0\0" + TEXT)],
    ids=["no key", "no UTF-8", "key", "profile"])
def test_packed_texts_of_a_png_are_not_unpacked(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a millisecond, and a file has room for 32,768."""
    plain = encoded(picture(40, 30), "PNG")
    monkeypatch.setattr(PngImagePlugin, "_safe_zlib_decompress", lambda data: pytest.fail("unpacked"))
    at = plain.index(b"IDAT") - 4
    stuffed = plain[:at] + text * 100 + plain[at:-12] + text * 100 + plain[-12:]
    assert np.array_equal(pixels(stuffed), np.asarray(picture(40, 30)))


def test_a_large_image_is_converted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is right, and memory is that of the pixels and one piece."""
    rgba = picture(61, 47).convert("RGBA")
    rgba.putalpha(Image.linear_gradient("L").resize(rgba.size))
    depth = Image.fromarray(np.arange(61 * 47, dtype=np.uint16).reshape(47, 61) * 22)
    files = [encoded(rgba, "PNG"), encoded(rgba.convert("LA"), "PNG"), encoded(depth, "PNG"),
             encoded(picture(61, 47).quantize(9), "PNG", transparency=3), encoded(picture(61, 47), "PNG", transparency=(
                 picture(61, 47).getpixel((0, 0)))), encoded(rgba.convert("CMYK"), "JPEG"), encoded(rgba, "WEBP")]
    whole = [pixels(file) for file in files]
    monkeypatch.setattr(decode_image, "STEP_PIXELS", 10 * 61 + 7)
    assert all(np.array_equal(pixels(file), seen) for file, seen in zip(files, whole))
    monkeypatch.undo()
    large = hostile.png(4000, 4000)
    tracemalloc.start()
    try:
        assert pixels(large).shape == (4000, 4000, 3)
        assert tracemalloc.get_traced_memory()[1] < 1.3 * 3 * 4000 * 4000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("data", [
    hostile.scans(1600, 1600, 500), hostile.arithmetic(2000, 2000, 25),
    hostile.run_length(2000, 2000, b"\1\1\0\0"), hostile.sub_blocks(60_000),
    hostile.png(8, 8, hostile.chunk(b"abCd") * 30_000), hostile.jpeg(before=hostile.segment(0xE1, b"Exif\0\0" + bytes(
        60_000)) * 60), hostile.png(8, 8, hostile.chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 20))) * 8)],
    ids=["scans", "arithmetic", "runs", "sub-blocks", "chunks", "segments", "profiles"])
def test_what_is_just_allowed_is_soon_decoded(data: bytes) -> None:
    header = image_header.read(data)
    began = time.process_time()
    assert pixels(data).shape == (header.height, header.width, 3)
    assert time.process_time() - began < 10     # a second, and minutes for the files that are refused


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP"]), data=st.data())
def test_damaged_files_end_as_pixels_or_media_error(kind: str, data: st.DataObject) -> None:
    whole = bytearray(encoded(picture(40, 30, 3), kind))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        header = image_header.read(bytes(whole))
        assume(header.width * header.height <= 1 << 28)     # more is refused by its header, and too much for a test
        found = pixels(bytes(whole))
        assert found.ndim == 3 and found.shape[2] == 3 and found.dtype == np.uint8
    except MediaError as error:
        assert error.code in IMAGE_CODES


def test_too_little_memory_is_not_the_images_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(image: Image.Image) -> Image.Image:
        raise MemoryError

    monkeypatch.setattr("epdd.worker.vision.decode_image._as_rgb", none)
    with pytest.raises(MemoryError):
        pixels(encoded(picture(8, 8), "PNG"))
