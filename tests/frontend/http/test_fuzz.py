"""Any input gets an answer or a proper refusal, within limits of time and memory by the input's size."""

from __future__ import annotations

import base64
import io
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from epdd.errors import IMAGE_CODES, MediaError, RequestError
from epdd.families import ModelInfo
from epdd.frontend.images import image_header
from epdd.frontend.images.media import data_url
from epdd.frontend.requests import completion_requests, request_validation
from epdd.frontend.requests.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from epdd.worker.vision.decode_image import decode

from tests.frontend.bench import Bench, hosted
from tests.frontend.http import hostile

pytestmark = pytest.mark.takes(30)

FAMILY = ModelInfo("qwen2_vl", "x", 1, (2, 1, 3), 14, 2, 2, 3136, 200704, (), (), 8, 1, 4096, 100, ())
SECONDS_MAX = 1.0           # of processor time, for one input; the usual is under a millisecond
MEMORY_TIMES = 80           # of the input's size: a JSON element takes up to 60 times its bytes
MEMORY_BASE = 1 << 20

SCALARS = (st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
           | st.text(max_size=8) | st.sampled_from(["text", "image_url", "user", "system", "tool", "assistant"]))
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12)
PART = st.fixed_dictionaries({}, optional={
    "type": st.sampled_from(["text", "input_text", "image_url", "input_image", "refusal", "video_url"]) | JSON,
    "text": st.text(max_size=8) | JSON, "refusal": JSON, "image_url": JSON | st.fixed_dictionaries(
        {"url": st.text(max_size=8) | JSON}, optional={"detail": JSON})})
MESSAGE = st.fixed_dictionaries({}, optional={
    "role": st.sampled_from(["user", "assistant", "tool", "developer"]) | JSON,
    "content": st.text(max_size=8) | st.lists(PART | JSON, max_size=3) | JSON, "name": JSON, "tool_call_id": JSON,
    "tool_calls": JSON | st.lists(st.fixed_dictionaries({}, optional={"id": JSON, "function": st.fixed_dictionaries(
        {"name": JSON, "arguments": JSON | st.text(max_size=8)})}), max_size=2)})


def fields(kind: Any, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Bodies with any of the definition's fields, and sometimes others."""
    return st.tuples(
        st.fixed_dictionaries({}, optional={name: known.get(name, JSON) for name in kind.__struct_fields__}),
        st.dictionaries(st.text(max_size=8), JSON, max_size=1)).map(lambda both: both[0] | both[1])


MESSAGES = st.lists(MESSAGE, max_size=3) | JSON
BODIES = {
    "chat": (fields(ChatBody, messages=MESSAGES),
             lambda body, strict: completion_requests.parse(body, FAMILY, ("m",), strict)),
    "text": (fields(CompletionBody),
             lambda body, strict: completion_requests.parse_text(body, FAMILY, ("m",), strict)),
    "tokenize": (fields(TokenizeBody, messages=MESSAGES),
                 lambda body, strict: request_validation.parse(body, TokenizeBody, strict)),
    "detokenize": (fields(DetokenizeBody), lambda body, strict: request_validation.parse(body, DetokenizeBody, strict)),
}


def tried(call: Callable[[], Any], size: int) -> None:
    """`call` returns or refuses within the limits; a refusal is a 4xx with a short message."""
    began = time.process_time()
    _refused_at_most(call)
    assert time.process_time() - began < SECONDS_MAX
    tracemalloc.start()     # slows everything down
    try:
        _refused_at_most(call)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BASE + MEMORY_TIMES * size
    finally:
        tracemalloc.stop()


def _refused_at_most(call: Callable[[], Any]) -> None:
    try:
        call()
    except RequestError as error:
        assert 400 <= error.status < 500 and 0 < len(error.message) < 1000


@pytest.mark.parametrize("kind", BODIES)
@settings(max_examples=150)
@given(data=st.data(), strict=st.booleans())
def test_bodies_of_every_shape(kind: str, data: st.DataObject, strict: bool) -> None:
    strategy, parse = BODIES[kind]
    body = json.dumps(data.draw(strategy)).encode()
    tried(lambda: parse(body, strict), len(body))


@pytest.mark.parametrize("kind", BODIES)
@given(data=st.data())
def test_damaged_bodies(kind: str, data: st.DataObject) -> None:
    """Real bodies with bytes removed, inserted and changed; and random bytes."""
    strategy, parse = BODIES[kind]
    body = bytearray(json.dumps(data.draw(strategy)).encode())
    for at, count, new in data.draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 9), st.binary(max_size=4)),
                                             max_size=4)):
        body[at:at + count] = new
    tried(lambda: parse(body, False), len(body))
    junk = data.draw(st.binary(max_size=200))
    tried(lambda: parse(junk, False), len(junk))


@pytest.mark.parametrize("make", [
    lambda n: b'{"messages": [' + b'{"role": "user", "content": "x"},' * n + b'{"role": "user", "content": "x"}]}',
    lambda n: b'{"messages": [{"role": "user", "content": [' + b'"x",' * n + b'"x"]}]}',
    lambda n: b'{"messages": ' + b"[" * n + b"]" * n + b"}",
    lambda n: b'{"x": ' + b'{"a":' * n + b"1" + b"}" * n + b"}",
    lambda n: b'{"stop": [' + b'"x",' * n + b'"x"]}',
    lambda n: b'{"logit_bias": {' + b",".join(b'"%d": 1' % at for at in range(n)) + b"}}",
    lambda n: b'{"temperature": ' + b"9" * n + b"}",
    lambda n: b'{"' + b"x" * n + b'": 1}',
    lambda n: b'{"model": "' + b"\\u0000" * n + b'"}',
    lambda n: b'{"messages": [{"role": "' + b"x" * n + b'"}]}',
    lambda n: b'{"messages": [{"role": "user", "content": [{"type": "' + b"x" * n + b'"}]}]}',
    lambda n: b'{"chat_template_kwargs": {"' + b"x.[" * n + b'": 1}}',
], ids=range(12))
def test_large_bodies_of_one_kind(make: Callable[[int], bytes]) -> None:
    for count in (10, 100_000):
        body = make(count)
        for _, parse in BODIES.values():
            tried(lambda: parse(body, True), len(body))
            tried(lambda: parse(body, False), len(body))


@settings(max_examples=150)
@given(st.text(st.sampled_from("data:image/png;base64,=+-_ \r\nAQé\0"), max_size=80) | st.text(max_size=40),
       st.booleans())
@example(",", True)
def test_data_urls(text: str, prefixed: bool) -> None:
    url = "data:" + text if prefixed else text
    tried(lambda: data_url(url), len(url))


@given(st.binary(max_size=100), st.integers(0, 4))
def test_data_urls_give_back_what_they_hold(data: bytes, padding: int) -> None:
    code = base64.b64encode(data).decode().rstrip("=") + "=" * padding
    assert data_url(f"data:;base64,{code}") == data


def _file(form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Pillow.effect_noise((40, 30), 50).convert("L").save(file, form, **options)
    return file.getvalue()


def _exif(orientation: int) -> Pillow.Exif:
    tags = Pillow.Exif()
    tags[0x0112] = orientation
    return tags


FILES = [_file("PNG"), _file("PNG", exif=_exif(6)), _file("JPEG"), _file("JPEG", exif=_exif(8), progressive=True),
         _file("WEBP"), _file("WEBP", lossless=True, exif=_exif(3)), _file("GIF"), _file("BMP")]


HOSTILE = [hostile.two_headers(64, 65), hostile.another_chunk_first(64, 65), hostile.empty_sub_block(64, 65),
           hostile.two_frames(64, 65), hostile.scans(64, 64, 20), hostile.run_length(24, 16, b"\x18\1\0\0"),
           hostile.arithmetic(64, 64, 3), hostile.sub_blocks(20), hostile.jpeg(before=hostile.overlapping_exif(9)),
           hostile.png(8, 8, hostile.chunk(b"eXIf", _exif(6).tobytes()[6:]))]
PIECES = [b"\xff\xd9", b"\xff\xda\0\x0c", b"\xff\xc0\0\x0b\x08\0\x20\0\x20\1\1\x11\0", hostile.png_header(9, 7),
          hostile.chunk(b"IEND"), b"\x21\xff\0", b"\x21\xfe\0", b"\x2c\0\0\0\0\x20\0\x20\0\0", b"ANMF\x10\0\0\0",
          hostile.segment(0xE1, b"Exif\0\0" + _exif(5).tobytes()[6:])]


@settings(max_examples=300)
@given(st.sampled_from(FILES + HOSTILE), st.data())
def test_damaged_image_headers(file: bytes, data: st.DataObject) -> None:
    """Files with changed bytes near the start, cut anywhere."""
    damaged = bytearray(file)
    for at, new in data.draw(st.lists(st.tuples(st.integers(0, 120), st.binary(min_size=1, max_size=4)), max_size=5)):
        damaged[at:at + len(new)] = new
    cut = bytes(damaged[:data.draw(st.integers(0, len(damaged)))])
    tried(lambda: image_header.read(cut), len(cut))
    tried(lambda: image_header.read(bytes(damaged)), len(damaged))


@given(st.sampled_from([b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBPVP8X", b"RIFF\0\0\0\0WEBPVP8 ",
                        b"RIFF\0\0\0\0WEBPVP8L", b"GIF89a", b"BM", b""]), st.binary(max_size=300))
def test_headers_that_never_were(magic: bytes, rest: bytes) -> None:
    tried(lambda: image_header.read(magic + rest), len(rest))


@pytest.mark.parametrize("file", [
    b"\xff\xd8\xff" + b"\xff" * 5_000_000, b"\xff\xd8\xff\xd0" * 1_000_000, b"\xff\xd8" + b"\xff\xe1\0\x02" * 1_000_000,
    b"\x89PNG\r\n\x1a\n" + bytes(5_000_000), b"GIF89a" + bytes(7) + b"\x21\xfe\x01x" * 1_000_000,
    b"GIF89a" + bytes(7) + b"\x21\xfe\0" * 1_000_000, b"RIFF\0\0\0\0WEBPVP8X" + bytes(5_000_000),
    b"\xff\xd8" + (b"\xff\xe1\xff\xffExif\0\0" + bytes(65527)) * 100,
    hostile.jpeg(behind=b"\xff\xda" * 1_000_000), hostile.scans(64, 64, 50_000),
    hostile.jpeg(before=hostile.segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b"tiff:Orientation" * 4000)),
    hostile.png(8, 8, hostile.chunk(b"iTXt", b"XML:com.adobe.xmp\0" + b"tiff:Orientation" * 100_000)),
    hostile.png(8, 8, hostile.chunk(b"abCd") * 200_000), hostile.sub_blocks(3_000_000), b"<" + b" " * 3_000_000,
    hostile.run_length(4000, 4000, b"\1\1\0\0"), b"\0\0\0\x20ftyp" + bytes(3_000_000),
], ids=range(17))
def test_long_headers_of_one_kind(file: bytes) -> None:
    tried(lambda: image_header.read(file), len(file))


LARGE = 32 << 20            # media.max_file_bytes
LONGEST: dict[str, Callable[[], bytes]] = {
    "restart markers, then scans": lambda: hostile.jpeg(
        behind=(b"\xff\xd0" + bytes(22)) * (LARGE // 24 - 50)).replace(hostile.END, b"") + b"\xff\xda\0\2" * 40,
    "nothing but scans behind": lambda: hostile.jpeg(behind=b"\xff\xda" * (LARGE // 2 - 500)),
    "sub-blocks": lambda: hostile.sub_blocks(LARGE // 2 - 500),
    "chunks": lambda: hostile.png(8, 8, hostile.chunk(b"abCd") * (LARGE // 12 - 50)),
    "EXIF segments": lambda: hostile.jpeg(before=hostile.segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 500),
    "XMP": lambda: hostile.png(8, 8, hostile.chunk(
        b"iTXt", b"XML:com.adobe.xmp\0" + b"tiff:Orientation" * (LARGE // 17))),
    "fill": lambda: b"\xff\xd8" + b"\xff" * LARGE,
}


@pytest.mark.parametrize("kind", LONGEST)
def test_the_largest_headers_take_a_tenth_of_a_second(kind: str) -> None:
    """CPU time of this thread, the best of five; twice that is allowed for slower machines."""
    file = LONGEST[kind]()
    assert LARGE * 0.9 < len(file) <= LARGE + 2
    taken = []
    for _ in range(5):
        began = time.thread_time()
        _refused_at_most(lambda: image_header.read(file))
        taken.append(time.thread_time() - began)
    assert min(taken) < 0.2


@settings(max_examples=200)
@given(st.sampled_from(FILES + HOSTILE), st.data())
def test_daemon_and_encoder_see_one_picture(file: bytes, data: st.DataObject) -> None:
    """Bytes changed, removed, inserted or from another file: the decoded size is the one that the daemon read."""
    damaged = bytearray(file)
    for at, count, new in data.draw(st.lists(st.tuples(
            st.integers(2, min(len(file), 400)), st.integers(0, 12),
            st.binary(max_size=6) | st.sampled_from(PIECES)), max_size=4)):
        damaged[at:at + count] = new
    try:
        header = image_header.read(bytes(damaged))
        if header.width * header.height > 1 << 22:
            return
        found = decode(bytes(damaged), (header.width, header.height), header.orientation)
    except MediaError as error:
        assert error.code in IMAGE_CODES
    else:
        assert found.shape == (*header.upright[::-1], 3)


@hosted()
async def test_no_request_is_a_fault_of_ours(bench: Bench) -> None:
    """Through HTTP: no 5xx, and the server goes on."""
    bodies: list[bytes] = []

    @settings(max_examples=50, database=None)
    @given(fields(ChatBody, messages=MESSAGES))
    def collect(body: Any) -> None:
        bodies.append(json.dumps(body).encode())

    collect()
    for body in bodies:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            answer = await bench.http.post(bench.url + path, data=body)
            assert answer.status < 500 and len(await answer.read()) < 100_000
    assert (await bench.chat()).status == 200 and bench.door.in_flight == 0
