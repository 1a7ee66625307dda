"""D01 to D14: oddities of image files.

The log-probabilities of the demo model's answer stand for the pixels that reach the encoder.  They are compared with
those of a plain PNG of the right pixels, and of the pixels that the fault would give.
"""

from __future__ import annotations

import asyncio
import io
import struct

from PIL import Image, ImageOps

from tests.field.cases import pictures
from tests.field.cases.pictures import file, plain
from tests.field.bench import Bench, little_memory
from tests.field.table import case
from tests.frontend.http import hostile

COLOUR = "What colour is the circle?"


@case("D01", "phone photo, EXIF orientation 6", "24x16 JPEG, red stored left, by data: and by http:",
      "200, the upright picture; malformed EXIF is ignored")
async def orientation(bench: Bench) -> None:
    photo = pictures.turned(6)
    stored = Image.open(io.BytesIO(photo))
    upright, lying = file(ImageOps.exif_transpose(stored)), file(stored.convert("RGB"))
    bench.host.files["/photo.jpg"] = photo
    await bench.other_view(upright, lying)
    await bench.same_view((photo, upright), (pictures.part(bench.host.url + "/photo.jpg"), upright))
    for broken in (b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0",
                   b"Exif\0\0garbage"):
        await bench.same_view((pictures.turned(broken), lying))


@case("D02", "palette PNG with tRNS", "index 1: green, and transparent", "200, white",
      policy="transparent pixels become white")
async def palette(bench: Bench) -> None:
    await bench.other_view(plain("white"), plain("lime"))
    await bench.same_view((pictures.palette(), plain("white")))


@case("D03", "transparent pixels that hide a colour", "64x64 RGBA, all (255, 0, 0, 0)", "200, white",
      policy="transparent pixels become white")
async def alpha(bench: Bench) -> None:
    await bench.same_view((plain((255, 0, 0, 0), mode="RGBA"), plain("white")),
                          (plain((0, 0), mode="LA"), plain("white")))
    await bench.other_view(plain("red"), plain("white"))


@case("D04", "16-bit grey PNG", "256x256, 0 to 65535", "200, value >> 8")
async def deep(bench: Bench) -> None:
    ramp = Image.frombytes("L", (256, 256), bytes(row for row in range(256) for _ in range(256)))
    clipped = Image.frombytes("L", (256, 256), bytes(min(255, i) for i in range(65536)))
    await bench.other_view(file(ramp), file(clipped))
    await bench.same_view((pictures.deep_ramp(), file(ramp)))


@case("D05", "CMYK JPEG", "64x64 from CMYK (0, 255, 255, 0)", "200, red")
async def cmyk(bench: Bench) -> None:
    await bench.same_view((plain((0, 255, 255, 0), form="JPEG", mode="CMYK"), plain((255, 0, 0))))
    await bench.other_view(plain((255, 0, 0)), plain((0, 255, 255)))


@case("D06", "grey and colour JPEG together", "in one request; in two at once, and with a broken one",
      "200 for all but the broken one")
async def channels(bench: Bench) -> None:
    grey, colour = (pictures.photo(mode=mode) for mode in ("L", "RGB"))
    assert (await bench.ask(grey, colour, "List the images in order.")).status == 200
    for seed in range(3):
        grey, colour = (pictures.photo(mode=mode, size=(100 + seed, 100)) for mode in ("L", "RGB"))
        wholes = await asyncio.gather(*(bench.ask(image, COLOUR) for image in (
            grey, colour, colour[:-60], pictures.circle("red", 100 + seed))))
        assert [whole.status for whole in wholes] == [200, 200, 400, 200] and wholes[3].said == "red"


@case("D07", "1x1 pixel", "alone, and beside a normal image", "200, on the processor's smallest grid",
      policy="enlarged, not refused")
async def pixel(bench: Bench) -> None:
    alone = await bench.ask(plain("red", (1, 1)), "Describe the image.", max_tokens=1)
    assert alone.body["usage"]["prompt_tokens_details"]["image_tokens"] == 16      # 64 x 64 pixels, 16 x 16 a token
    text = await bench.answers(plain("blue", (1, 1)), pictures.circle("green"), "What is in image 2?")
    assert text == "a green circle"


@case("D08", "3 pixels high", "22x3 and 60x1 RGB PNG, and the same turned", "200, on a grid as wide as the image")
async def narrow(bench: Bench) -> None:
    for size in ((22, 3), (60, 1)):
        flat = pictures.noise(*size)
        image = Image.open(io.BytesIO(flat))
        rgba = image.convert("RGBA")
        await bench.same_view((flat, file(rgba)))
        await bench.other_view(flat, file(image.transpose(Image.Transpose.TRANSPOSE)))


@case("D09", "aspect ratio over 200", "1093x5, and 1000x5, exactly 200", "400 invalid_image, and 200")
async def aspect(bench: Bench) -> None:
    await bench.refused("invalid_image", plain("red", (1093, 5)), "What is this?")
    assert (await bench.ask(plain("red", (1000, 5)), "What is this?")).status == 200


@case("D10", "truncated JPEG", "without its last 1, 16, 128 bytes; half of it", "400 image_parse_error",
      policy="missing pixels are never guessed", repeats=25)
async def truncated(bench: Bench) -> None:
    whole = pictures.photo()
    assert (await bench.ask(whole, "What is this?", max_tokens=1)).status == 200
    for cut in (1, 16, 128, len(whole) // 2):
        await bench.refused("image_parse_error", whole[:-cut], "What is this?")


@case("D11", "decompression bomb", "1-bit PNG of 9000, 13000 and 20000 pixels a side; 32 at once",
      "400 image_too_large from the header, no memory", policy="the cap is media.max_pixels")
async def bomb(bench: Bench) -> None:
    with little_memory(bench, 50_000_000):
        for side in (9000, 13000, 20000):
            data = await asyncio.to_thread(pictures.bomb, side)
            assert len(data) < 100_000
            await bench.refused("image_too_large", data, "What is this?")
        replies = await asyncio.gather(*(bench.ask(data, "What is this?") for _ in range(32)))
        assert {reply.error["code"] for reply in replies} == {"image_too_large"}


@case("D11s", "small files that take long", "JPEG of 3,000 scans, BMP of runs, GIF of sub-blocks, PNG of chunks",
      "400 image_too_large from the header", policy="scans, segments and chunks are counted before decoding")
async def much_work(bench: Bench) -> None:
    for data in (hostile.scans(8000, 7998, 3000), hostile.run_length(1000, 1100, b"\1\1" * 1000 + b"\0\0"),
                 hostile.sub_blocks(100_000), hostile.png(8, 8, hostile.chunk(b"abCd") * 40_000),
                 hostile.jpeg(before=hostile.segment(0xE1, b"Exif\0\0" + bytes(9)) * 100)):
        await bench.refused("image_too_large", data, "What is this?")
    motion = hostile.jpeg(64, 64, behind=b"film" + b"\xff\xda\0\x0c" * 5000, progressive=True)
    await bench.same_view((motion, file(Image.open(io.BytesIO(motion)).convert("RGB"))))


@case("D11h", "two sizes in one file", "PNG with two headers or another chunk first, GIF with an empty sub-block",
      "400 image_parse_error, no memory", policy="an encoder decodes no other size than the header's")
async def two_sizes(bench: Bench) -> None:
    with little_memory(bench, 50_000_000):
        # Decoded, each would take over 100 MB.
        for lie in (hostile.two_headers, hostile.another_chunk_first, hostile.empty_sub_block, hostile.two_frames):
            data = await asyncio.to_thread(lie, 64, 4000)
            await bench.refused("image_parse_error", data, "What is this?")


@case("D12", "wrong label", "image/jpeg on WebP, PNG and BMP bytes; text/html on a JPEG",
      "200 by the bytes; text/html: 400 unsupported_image_media_type", policy="a label that is no image's is refused")
async def label(bench: Bench) -> None:
    image = Image.open(io.BytesIO(pictures.circle("blue")))
    for form in ("WEBP", "PNG", "BMP"):
        part = pictures.part(pictures.url(file(image, form), "data:image/jpeg;base64,"))
        assert await bench.answers(part, COLOUR) == "blue"
    part = pictures.part(pictures.url(file(image, "JPEG"), "data:text/html;base64,"))
    await bench.refused("unsupported_image_media_type", part, COLOUR)


@case("D13", "animations", "GIF and APNG of red, green, blue; a GIF of 20,000 frames",
      "200, the first frame; the others are not decoded")
async def animation(bench: Bench) -> None:
    await bench.same_view((pictures.animated("GIF"), plain("red")), (pictures.animated("PNG"), plain("red")))
    seconds = []
    for data in (pictures.long_gif(20_000), pictures.long_gif(1) + bytes(len(pictures.long_gif(20_000)))):
        replies = [await bench.ask(data + bytes([i]), "What is this?", max_tokens=1) for i in range(3)]
        assert {reply.status for reply in replies} == {200}
        seconds.append(min(reply.seconds for reply in replies))
    assert seconds[0] < 2 * seconds[1] + 0.2        # decoding all takes seconds


@case("D14", "no image at all", "\"hello\", nothing, headers cut short", "400 with a fixed message", repeats=100)
async def nothing(bench: Bench) -> None:
    for code, data in (("invalid_image_format", b"hello"), ("empty_image_file", b""),
                       ("image_parse_error", b"\x89PNG\r\n\x1a\n" + struct.pack(">I4s", 13, b"IHDR")),
                       ("image_parse_error", b"GIF89a\1")):
        assert (await bench.ask(data, "What is this?")).error["code"] == code


@case("D14f", "unsupported formats", "TIFF, PDF, SVG, HEIC", "400 unsupported_image_media_type with the name",
      policy="another code than for files that are no image")
async def not_taken(bench: Bench) -> None:
    for name, data in (("TIFF", b"II*\0" + bytes(40)), ("PDF", b"%PDF-1.7"), ("SVG", b"<?xml?><svg/>"),
                       ("HEIC", b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic")):
        reply = await bench.refused("unsupported_image_media_type", data, "What is this?")
        assert f"in the format {name}," in reply.error["message"] and "JPEG, PNG" in reply.error["message"]
