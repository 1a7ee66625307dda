"""Large requests do not delay others: neither the event loop's thread nor a C call in another thread runs long.

Other threads hold the interpreter, and so the event loop, while a call into C lasts.  Times are CPU time of the thread,
the best of five runs: on a busy machine caches are cold, which costs CPU time too.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd.errors import BadRequest, ContextLength, MediaError, RequestError
from epdd.frontend.requests import inline_files
from epdd.frontend.requests.inline_files import InlineLimits, extract
from epdd.frontend.requests.request_validation import parse
from epdd.frontend.requests.schema import ChatBody

from tests.frontend.bench import Bench, hosted

pytestmark = pytest.mark.takes(30)

HOLD_S = 0.05
GOES = 5
_FREE = {"encode_batch_fast", "decode_batch"}       # let others run meanwhile


class Holds:
    """The longest uninterrupted times: of the loop's thread, and of C calls in other threads."""

    def __init__(self) -> None:
        self.loop = 0.0
        self.calls: dict[str, float] = {}
        self._local = threading.local()

    async def look(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            self.loop = max(self.loop, time.thread_time() - began)

    def worst(self) -> str:
        return f"loop {self.loop}, calls {sorted(self.calls.items(), key=lambda call: -call[1])[:3]}"

    def profile(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call":
            self._local.began = time.thread_time()
        elif event == "c_return" and getattr(self._local, "began", None) is not None:
            name = function.__name__
            if name not in _FREE:
                self.calls[name] = max(self.calls.get(name, 0.0), time.thread_time() - self._local.began)
            self._local.began = None
        elif event == "call":
            self._local.began = None        # not a call that ends in C


@contextmanager
def watched() -> Iterator[Holds]:
    holds = Holds()
    gc.collect()
    gc.freeze()         # as the daemon at its start: a test's process has far more objects
    threading.setprofile(holds.profile)
    try:
        yield holds
    finally:
        threading.setprofile(None)
        gc.unfreeze()


async def holds_nobody(go: Callable[[], Awaitable[None]], calls: bool = True) -> None:
    """The requests of `go` hold the loop, and C calls in other threads if `calls`, for less than HOLD_S."""
    for _ in range(GOES):
        with watched() as holds:
            look = asyncio.create_task(holds.look())
            await go()
            look.cancel()
        if max([holds.loop, *(holds.calls.values() if calls else ())]) < HOLD_S:
            return
    raise AssertionError(holds.worst())


def talk(content: bytes, **fields: Any) -> bytes:
    more = b"".join(b',"%b":%b' % (name.encode(), json.dumps(value).encode()) for name, value in fields.items())
    return b'{"messages":[{"role":"user","content":%b}]%b}' % (content, more)


def text(letters: str, size: int) -> bytes:
    return b'"' + letters.encode() * (size // len(letters.encode())) + b'"'


MIB = 1 << 20
LARGE = {
    "100 MB of text": lambda: talk(text("a ", 100 * MIB)),
    "100 MB of control tokens": lambda: talk(text("<|im_start|>", 100 * MIB)),
    "60 MB of escapes": lambda: talk(text("\\u0344", 60 * MIB)),
    "60 MB of quotes": lambda: talk(text('\\"data:', 60 * MIB)),
    "60 MB of backslashes": lambda: talk(text("\\\\", 60 * MIB)),
    "a tool's description of 50 MB": lambda: talk(b'"hi"', tools=[{"type": "function", "function": {
        "name": "f", "description": "x" * 50 * MIB, "parameters": {"type": "object"}}}]),
    "a data: URL of 120 MB": lambda: talk(b'[{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}]'
                                          % (b"QUJD" * 30 * MIB)),
    "a data: URL of 60 MB as text": lambda: talk(b'"data:image/png;base64,%b"' % (b"QUJD" * 15 * MIB)),
    "an image of 40 MB, escaped": lambda: talk(b'[{"type":"image_url","image_url":"data:image/png;base64,%b"}]'
                                               % (b"QU\\/D" * 8 * MIB)),
    "8 MB of text": lambda: talk(text("a ", 8 * MIB - 100)),
    "8 MB of control tokens": lambda: talk(text("<|im_start|>", 8 * MIB - 100)),
    "8 MB of emoji": lambda: talk(text("🫠", 8 * MIB - 100)),
    "8 MB of accents": lambda: talk(text("\\u0344", 8 * MIB - 100)),
    "a tool's description of 7 MB": lambda: talk(b'"hi"', tools=[{"type": "function", "function": {
        "name": "f", "description": "é" * 3 * MIB, "parameters": {"type": "object"}}}]),
    "a schema of 7 MB": lambda: talk(b'"hi"', response_format={"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "object", "description": "x" * 7 * MIB}}}),
    "8 MB of lists in a call's arguments": lambda: (
        b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"\\u005b%b0\\u005d"}}]}]}'
        % (b"\\u005b\\u005d\\u002c" * 430_000)),
    "8 MB of lists in a schema": lambda: talk(b'"hi"')[:-1] + b',"guided_json":"\\u005b%b0\\u005d"}' % (
        b"\\u005b\\u005d\\u002c" * 430_000),
    "an image URL of 7 MB": lambda: talk(b'[{"type":"image_url","image_url":"http://a/%b"}]' % (b"%41 " * 1_800_000)),
    "an image URL of 30 kB of host": lambda: talk(b'[{"type":"image_url","image_url":"http://%b/"}]'
                                                  % ("é" * 15_000).encode()),
    "a data: URL of 30 MB of options": lambda: talk(b'[{"type":"image_url","image_url":"data:%b"}]'
                                                    % (b";" * 30 * MIB)),
    "numbers": lambda: b'{"prompt":[' + b"151643," * 530_000 + b"7]}",
    "lists": lambda: talk(b"[" + b"[]," * 76_000 + b"[]]"),
    "names": lambda: b'{"messages":[],"x":{' + b",".join(b'"%x":0' % n for n in range(122_000)) + b"}}",
    "fields": lambda: b"{" + b",".join(b'"%x":0' % n for n in range(122_000)) + b"}",
    "parts": lambda: talk(b"[" + b",".join([b'{"type":"text","text":"a"}'] * 9_999) + b"]"),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_bodies_hold_nobody(family: Any, name: str) -> None:
    body = LARGE[name]()

    @hosted()
    async def test(bench: Bench) -> None:
        path = "/v1/completions" if body.startswith(b'{"prompt"') else "/v1/chat/completions"
        assert (await bench.chat()).status == 200       # one-time work is done

        async def go() -> None:
            async with bench.http.post(bench.url + path, data=pieces(body)) as answer:
                assert answer.status == 400, await answer.text()
                found = await answer.json()
            assert len(found["error"]["message"]) < 300
            assert bench.context.stats.gauges["bodies"]() == 0

        await holds_nobody(go)

    test(family)


USUAL = {
    "32 prompts of 16,000 characters": ("/v1/completions", {"prompt": ["ab cd ef " * 1780] * 32, "max_tokens": 1,
                                                            "truncate_prompt_tokens": 9}),
    "524,288 tokens": ("/detokenize", {"tokens": [300] * (1 << 19)}),
    "a grammar of 16 kB": ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "hi"}],
        "guided_grammar": "root ::= " + ("(" * 23 + '"a"' + ")?" * 23 + " ") * 190}),
}


@pytest.mark.parametrize("name", USUAL)
def test_large_requests_that_are_served_hold_nobody(family: Any, name: str) -> None:
    path, asked = USUAL[name]
    body = orjson.dumps(asked)

    @hosted()
    async def test(bench: Bench) -> None:
        assert (await bench.chat()).status == 200

        async def go() -> None:
            async with bench.http.post(bench.url + path, data=pieces(body)) as answer:
                assert answer.status == 200, await answer.text()

        await holds_nobody(go)

    test(family)


def asked(port: int, data: bytes) -> bytes:
    """The server's bytes in reply, until it closes."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        sender = threading.Thread(target=client.sendall, args=[data])
        sender.start()
        with client.makefile("rb") as answer:
            told = answer.read()
        sender.join()
    return told


BODY = b'{"messages":[{"role":"user","content":"hello"}]}' + b" " * 300_000
CHUNKED = b"".join(b"1\r\n%c\r\n" % letter for letter in BODY) + b"0\r\n\r\n"
HEAD = b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CLOSE = b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(("sent", "answers"), [
    (b"POST /v1/chat/completions" + HEAD + CHUNKED + CLOSE, [b"chatcmpl-", b'"ok"']),
    (b"GET /version" + HEAD + CHUNKED + CLOSE, [b"version", b'"ok"']),
    (b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 5000 + CLOSE, [b"version"] * 5000 + [b'"ok"']),
], ids=["a body of one-byte chunks", "one that nobody reads", "pipelined"])
def test_small_pieces_hold_nobody(family: Any, sent: bytes, answers: list[bytes]) -> None:
    """The parser made 40,000 chunks of one read, and the body's reader 130,000 pieces without a pause: 0.15 s."""
    @hosted()
    async def test(bench: Bench) -> None:
        port = int(bench.url.rpartition(":")[2])
        assert (await bench.chat()).status == 200
        with watched() as holds:
            look = asyncio.create_task(holds.look())
            told = await asyncio.to_thread(asked, port, sent)
            look.cancel()
        found = told.split(b"HTTP/1.1 ")[1:]
        assert len(found) == len(answers) and all(
            one.startswith(b"200") and answer in one for one, answer in zip(found, answers)), told[:1000]
        assert holds.loop < HOLD_S, holds.worst()

    test(family)


async def pieces(body: bytes) -> Any:
    """The client shares the loop's thread: in small steps it does not count."""
    for at in range(0, len(body), 1 << 18):
        yield body[at:at + (1 << 18)]
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_long_answer_holds_nobody(family: Any, path: str) -> None:
    """Not streamed, with the log probabilities of 8 times 2,000 tokens and of 5 others for each."""
    @hosted()
    async def test(bench: Bench) -> None:
        bench.script.play = bench.script.say("hello " * 1000)
        ask = {"n": 8, "logprobs": 5, "prompt": "x", "max_tokens": 2000} if path == "/v1/completions" else {
            "n": 8, "logprobs": True, "top_logprobs": 5, "messages": [{"role": "user", "content": "x"}]}
        body = orjson.dumps(ask)

        async def go() -> None:
            async with bench.http.post(bench.url + path, data=body) as answer:
                text[:] = [await answer.read()]
                assert answer.status == 200

        text: list[bytes] = []
        await holds_nobody(go, calls=False)
        assert len(text[0]) > 800_000, len(text[0])
        told = orjson.loads(text[0])
        marks = [choice["logprobs"] for choice in told["choices"]]
        assert [len(mark.get("content") or mark["tokens"]) for mark in marks] == [
            told["usage"]["completion_tokens"] // 8 - (choice["finish_reason"] == "stop")
            for choice in told["choices"]]

    test(family)


# --- extracting images from the JSON

URL = "data:image/png;base64," + "QUJD" * (6 << 10)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@given(st.lists(st.one_of(
    st.builds(lambda n, rest: image(URL[:-n] + rest), st.integers(1, 4),
              st.sampled_from(("", "=", "/+", "\n", "é", "\\"))),
    st.builds(lambda rest: {"type": "text", "text": rest + URL}, st.sampled_from(("", "x", '"', "\\", '\\"', "data:"))),
    st.text(max_size=5).map(lambda text: {"type": "text", "text": text}),
    st.just({"type": "image_url", "image_url": URL})), max_size=5), st.booleans(), st.booleans())
def test_what_is_lifted_comes_back(parts: list[Any], slashes: bool, indented: bool) -> None:
    """A body's meaning does not depend on the extraction."""
    data = {"messages": [{"role": "user", "content": parts}], "user": URL[:100], URL: 1}
    body = json.dumps(data, ensure_ascii=False, indent=1 if indented else None).encode()
    if slashes:
        body = body.replace(b"/", b"\\/")
    found = extract(body, InlineLimits())
    assert len(found.text) + sum(len(url) for url in found.urls.values()) <= len(body) + 40 * len(found.urls)
    asked, ignored = parse(body, ChatBody, False)
    content = asked.messages[0].content
    assert ignored == (URL, "user")
    assert json.loads(json.dumps([_plain(part) for part in content or ()])) == parts


def _plain(part: Any) -> Any:
    if hasattr(part, "text"):
        return {"type": "text", "text": part.text}
    url = part.image_url
    return image(url.url) if not isinstance(url, str) else {"type": "image_url", "image_url": url}


def test_images_are_lifted_and_only_they() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": [image(URL), image(URL + "A"), "text"]}]}).encode()
    extracted = extract(body, InlineLimits())
    assert list(extracted.urls.values()) == [URL, URL + "A"] and len(extracted.text) < 400
    data = orjson.loads(extracted.text)
    assert extracted.restore(data) and data == json.loads(body)
    # The place of a JSON error is in bytes of the sent body.
    with pytest.raises(BadRequest, match=f"byte {len(body) - 1}"):
        parse(body[:-1] + b"!", ChatBody, False)


@pytest.mark.parametrize(("body", "error"), [
    (talk(text("x", 2000)), ContextLength), (talk(b'"%b"' % URL.encode()), BadRequest),
    (talk(b'[{"type":"image_url","image_url":"data:,%b"}]' % (b"A" * 40_000)), MediaError)])
def test_limits(body: bytes, error: type[RequestError], monkeypatch: Any) -> None:
    monkeypatch.setattr(inline_files, "_LEAST", 500)
    with pytest.raises(error):
        parse(body, ChatBody, False, InlineLimits(text_bytes=1000, file_bytes=18_500))
    assert InlineLimits.of(4096, 5) == InlineLimits(8 << 20, 5) and InlineLimits.of(400_000, 5).text_bytes == 12_800_000
    assert InlineLimits.of(10_000_000, 5).text_bytes == 16 << 20
