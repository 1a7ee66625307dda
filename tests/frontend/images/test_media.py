"""Images of requests: data: URLs, limits, keys, the budget."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image as Pillow

from epdd.dispatch.request import Image
from epdd.errors import BadRequest, MediaError
from epdd.families import ModelInfo
from epdd.frontend.images.media import Media, data_url
from epdd.frontend.requests.messages import ImageRef
from epdd.settings.service import MediaSettings as Limits

from tests.frontend.images.test_image_header import bomb

EXECUTOR = ThreadPoolExecutor(2)


def picture(size: tuple[int, int] = (70, 42), colour: str = "red", form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", size, colour).save(file, form, **options)
    return file.getvalue()


PNG = picture()
CODE = base64.b64encode(PNG).decode()


def url(data: bytes = PNG, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def images(family: ModelInfo, urls: Sequence[str], low: int = 0, high: int = 0, **limits: Any) -> list[Image]:
    async def go() -> list[Image]:
        media = Media(Limits(**limits), family, EXECUTOR)
        try:
            refs = [ImageRef(text, f"messages[0].content[{index}]") for index, text in enumerate(urls)]
            async with media.images(refs, low, high) as held:
                found = list(held.images)
                assert media.budget.used == sum(len(image.data) for image in found)
                held.release()
                assert media.budget.used == 0 and held.images == []
                return found
        finally:
            assert media.budget.used == 0
            await media.close()

    return asyncio.run(go())


def fault(family: ModelInfo, text: str, **limits: Any) -> MediaError:
    with pytest.raises(MediaError) as caught:
        images(family, [text], **limits)
    assert caught.value.param == "messages[0].content[0]"
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("text", [
    f"data:image/png;base64,{CODE}",
    f"DATA:IMAGE/PNG;BASE64,{CODE}",
    f"data:;base64,{CODE}",
    f"data:image;base64,{CODE}",
    f"data:image/jpeg;base64,{CODE}",                   # a wrong label: the bytes decide
    f"data:image/png;name=a.png;base64,{CODE}",
    f"data:image/png;base64;charset=utf-8,{CODE}",
    f"data:application/octet-stream;base64,{CODE}",
    "data:image/png;base64," + "\r\n".join(CODE[at:at + 76] for at in range(0, len(CODE), 76)) + "\n",
    f"data:image/png;base64, {CODE}",
    f"data:image/png;base64,{CODE.rstrip('=')}",
    f"data:image/png;base64,{CODE.rstrip('=')}=====",
    f"data:image/png;base64,{CODE.replace('+', '-').replace('/', '_')}",
])
def test_spellings_of_a_data_url(family: ModelInfo, text: str) -> None:
    assert data_url(text) == PNG
    assert images(family, [text]) == images(family, [url()])    # the cache key too


@pytest.mark.parametrize(("text", "code"), [
    ("data:image/png;base64,not!!!base64", "invalid_base64_image"),
    ("data:image/png;base64,AAAAA", "invalid_base64_image"),
    ("data:image/png;base64,AA=A", "invalid_base64_image"),
    ("data:image/png;base64,AAAÄ", "invalid_base64_image"),
    (f"data:image/png,{CODE}", "invalid_base64_image"),
    (f"data:image/png;base64{CODE}", "invalid_base64_image"),
    ("data:", "invalid_base64_image"),
    ("data:text/plain;base64,aGVsbG8=", "unsupported_image_media_type"),
    (f"data:text/html;base64,{CODE}", "unsupported_image_media_type"),
    ("data:image/png;base64,aGVsbG8=", "invalid_image_format"),
    ("data:image/png;base64,", "empty_image_file"),
    (url(PNG[:20]), "image_parse_error"),
    ("file:///etc/passwd", "invalid_image_url"),
    ("/etc/passwd", "invalid_image_url"),
    ("ftp://example.org/a.png", "invalid_image_url"),
    ("", "invalid_image_url"),
    (CODE, "invalid_image_url"),
])
def test_faults_have_codes_and_fixed_texts(family: ModelInfo, text: str, code: str) -> None:
    error = fault(family, text)
    assert error.code == code
    assert len(error.message) < 200 and CODE[:20] not in error.message and "passwd" not in error.message


def test_an_image_is_known_from_its_header(family: ModelInfo) -> None:
    image, = images(family, [url(picture((100, 60)))])
    assert (image.width, image.height) == (100, 60)
    assert image.grid == family.grid(100, 60) == (1, 4, 8)
    assert image.rows == family.rows(image.grid) == 8


def test_the_upright_size_counts(family: ModelInfo) -> None:
    tags = Pillow.Exif()
    tags[0x0112] = 6
    image, = images(family, [url(picture((240, 60), form="JPEG", exif=tags))])
    assert (image.width, image.height) == (60, 240)
    assert image.grid == family.grid(60, 240)


def test_pixel_options_change_grid_and_key(family: ModelInfo) -> None:
    text = url(picture((560, 560)))
    plain, small = images(family, [text])[0], images(family, [text], high=56 * 56)[0]
    assert plain.grid == (1, 32, 32)[:1] + plain.grid[1:]
    assert small.grid == (1, 4, 4) != plain.grid
    assert plain.key != small.key


def test_keys_are_wide_and_by_content(family: ModelInfo) -> None:
    same, again, other = images(family, [url(), url(), url(picture(colour="blue"))])
    assert same.key == again.key != other.key
    assert len(bytes.fromhex(same.key)) >= 16


def test_equal_pixel_bytes_of_another_shape_differ(family: ModelInfo) -> None:
    wide, high = images(family, [url(picture((150, 30))), url(picture((30, 150)))])
    assert wide.key != high.key


def test_aspect_ratios(family: ModelInfo) -> None:
    assert fault(family, url(picture((1093, 5)))).code == "invalid_image"
    assert images(family, [url(picture((1000, 5)))])[0].width == 1000


def test_a_pixel_is_enough(family: ModelInfo) -> None:
    assert images(family, [url(picture((1, 1)))])[0].grid == (1, 4, 4)
    assert images(family, [url(picture((22, 3)))])[0].height == 3


def test_limits(family: ModelInfo) -> None:
    assert fault(family, url(picture((200, 100))), max_pixels=19_999).code == "image_too_large"
    assert images(family, [url(picture((200, 100)))], max_pixels=20_000)
    big = picture((300, 300), form="BMP")
    assert fault(family, url(big), max_file_bytes=len(big) - 10).code == "image_file_too_large"
    assert images(family, [url(big)], max_file_bytes=len(big))


def test_bombs_are_refused_by_their_header(family: ModelInfo) -> None:
    for side in (9_000, 20_000):
        error = fault(family, url(bomb(side)))
        assert error.code == "image_too_large" and f"{side} x {side}" in error.message


@pytest.mark.parametrize("most", [0, 2])
def test_too_many_images_are_refused_before_they_are_looked_at(family: ModelInfo, most: int) -> None:
    with pytest.raises(BadRequest) as caught:
        images(family, ["data:image/png;base64,not!!!base64"] * (most + 1), max_images=most)
    assert f"holds {most + 1} images; at most {most}" in caught.value.message
    assert images(family, [], max_images=most) == []


def test_one_bad_image_of_several_is_named(family: ModelInfo) -> None:
    with pytest.raises(MediaError) as caught:
        images(family, [url(), url(), "data:image/png;base64,!"])
    assert caught.value.param == "messages[0].content[2]"


def test_large_files_leave_the_loop_free(family: ModelInfo) -> None:
    text = url(picture((2900, 2900), form="BMP"))       # 25 MB

    async def go() -> tuple[float, float]:
        media = Media(Limits(), family, EXECUTOR)
        loop = asyncio.get_running_loop()
        gap, began = 0.0, loop.time()
        last = began

        async def read() -> None:
            async with media.images([ImageRef(text, "p")], 0, 0):
                pass

        task = asyncio.create_task(read())
        while not task.done():
            await asyncio.sleep(0.001)
            gap, last = max(gap, loop.time() - last), loop.time()
        await task
        await media.close()
        return gap, last - began

    gap, total = asyncio.run(go())
    assert gap < max(0.2, total / 2)    # the machine may be busy with other things


def test_requests_over_the_budget_take_turns(family: ModelInfo) -> None:
    data = picture((100, 100), form="BMP")

    async def go() -> None:
        media = Media(Limits(max_inflight_bytes=len(data) * 2 + 100), family, EXECUTOR)
        now, most = 0, 0

        async def use() -> None:
            nonlocal now, most
            async with media.images([ImageRef(url(data), "p")], 0, 0):
                now, most = now + 1, max(most, now + 1)
                try:
                    await asyncio.sleep(0.002)
                finally:
                    now -= 1

        tasks = [asyncio.create_task(use()) for _ in range(20)]
        for task in tasks[::3]:
            await asyncio.sleep(0.001)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most == 2 and media.budget.used == 0
        await media.close()

    asyncio.run(go())
