"""API keys and CORS: accepted and refused requests."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import openai
import pytest

from epdd.errors import ConfigError
from epdd.frontend.http import auth
from epdd.settings.service import ServerSettings

from tests.frontend.bench import Bench, hosted
from tests.frontend.http.test_app import envelope, raw

KEYS: Any = {"api_keys": ("sk-one", "sk-two")}
PAGE = "https://chat.example.com"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("headers", "status"), [
    (bearer("sk-one"), 200), (bearer("sk-two"), 200), ({"Authorization": "bearer   sk-two "}, 200),
    ({}, 401), (bearer(""), 401), (bearer("sk-on"), 401), (bearer("sk-one2"), 401), (bearer("SK-ONE"), 401),
    (bearer("sk-one,sk-two"), 401), ({"Authorization": "sk-one"}, 401), ({"Authorization": "Basic sk-one"}, 401),
    (bearer("\u00e9\u732b"), 401), (bearer("x" * 5000), 401)])
def test_who_gets_in(family: Any, headers: dict[str, str], status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    @hosted(server=KEYS)
    async def test(bench: Bench) -> None:
        for path, body in (("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                           ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
            answer = await bench.http.post(bench.url + path, json=body, headers=headers)
            assert answer.status == status
        for path in ("/v1/models", "/version", "/metrics", "/status"):
            answer = await bench.http.get(bench.url + path, headers=headers)
            assert answer.status == status
        if status == 401:
            assert answer.headers["WWW-Authenticate"] == "Bearer" and answer.headers["x-request-id"]
            error = (await answer.json())["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert "sk-" not in error["message"]
            # Without a key a request does not learn whether a path exists.
            assert (await bench.http.get(f"{bench.url}/nowhere", headers=headers)).status == 401
            assert bench.script.requests == [] and bench.context.stats.counts["accepted"] == 0
        for path in ("/health", "/ready", "/ping", "/", "/page/main.js"):
            assert (await bench.http.get(bench.url + path, headers=headers)).status == 200
            assert (await bench.http.head(bench.url + path, headers=headers)).status == 200

    test(family)
    assert "sk-one" not in caplog.text and "sk-one" not in repr(ServerSettings(**KEYS))


@hosted(server=KEYS)
async def test_without_a_key_no_body_is_asked_for(bench: Bench) -> None:
    answer = await raw(bench, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                       b"Content-Length: 100\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401") and envelope(answer)["code"] == "invalid_api_key"


@hosted(server=KEYS)
async def test_the_official_client(bench: Bench) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="sk-two", max_retries=0) as client:
        assert [model.id for model in (await client.models.list()).data] == ["tiny-vl"]
    async with openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
        assert caught.value.code == "invalid_api_key"


def test_keys_of_a_file(tmp_path: Path) -> None:
    class Request:
        path = "/v1/models"

        def __init__(self, key: str) -> None:
            self.headers = bearer(key)

    file = tmp_path / "keys"
    file.write_text("# ours\n sk-a \n\nsk-b\r\n")
    found = auth.Keys(ServerSettings(api_keys=("sk-c",), api_keys_file=str(file)))
    for key in ("sk-a", "sk-b", "sk-c"):
        found.check(Request(key))       # type: ignore[arg-type]
    for key in ("# ours", "ours", ""):
        with pytest.raises(auth.Unauthorized):
            found.check(Request(key))   # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "words"), [
    (None, "No such file"), ("", "holds no key"), ("# nothing\n\n", "holds no key"), ("sk-é\n", "characters"),
    ("two words\n", "characters"), (b"\xff\n", "not text")])
def test_files_that_would_let_everybody_or_nobody_in(tmp_path: Path, text: Any, words: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words) as caught:
        auth.Keys(ServerSettings(api_keys_file=str(file)))
    assert "sk-" not in caught.value.message


async def preflight(bench: Bench, origin: str, **headers: str) -> Any:
    return await bench.http.options(f"{bench.url}/v1/chat/completions", headers={
        "Origin": origin, "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang", **headers})


@hosted(server={**KEYS, "cors_origins": (PAGE,)})
async def test_a_page_that_is_let_in(bench: Bench) -> None:
    answer = await preflight(bench, PAGE)
    assert answer.status == 204 and await answer.read() == b""
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE and answer.headers["Vary"] == "Origin"
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type,x-stainless-lang"
    # Errors and streams can be read by the page too.
    answer = await bench.http.get(f"{bench.url}/v1/models", headers={"Origin": PAGE})
    assert answer.status == 401 and answer.headers["Access-Control-Allow-Origin"] == PAGE
    answer = await bench.http.post(
        f"{bench.url}/v1/chat/completions", headers={"Origin": PAGE, **bearer("sk-one")},
        json={"messages": [{"role": "user", "content": "x"}], "stream": True})
    assert answer.status == 200 and answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert "x-request-id" in answer.headers["Access-Control-Expose-Headers"]


@hosted(server={"cors_origins": (PAGE,)})
async def test_pages_that_are_not(bench: Bench) -> None:
    for origin in ("https://evil.example.com", "http://chat.example.com", PAGE + ".evil.com", "null"):
        assert (await preflight(bench, origin)).status == 405
        answer = await bench.http.get(f"{bench.url}/v1/models", headers={"Origin": origin})
        assert answer.status == 200 and "Access-Control-Allow-Origin" not in answer.headers
        assert answer.headers["Vary"] == "Origin"
    answer = await bench.http.options(f"{bench.url}/v1/models", headers={"Origin": PAGE})
    assert (answer.status, answer.headers["Allow"]) == (405, "GET,HEAD")     # no preflight


@hosted(server={"cors_origins": ("*",)})
async def test_all_pages(bench: Bench) -> None:
    assert (await preflight(bench, "null")).headers["Access-Control-Allow-Origin"] == "null"


@hosted()
async def test_off_by_default(bench: Bench) -> None:
    answer = await preflight(bench, PAGE)
    assert answer.status == 405 and (await answer.json())["error"]["code"] == "method_not_allowed"
    answer = await bench.http.get(f"{bench.url}/v1/models", headers={"Origin": PAGE})
    assert not [name for name in answer.headers if name.startswith(("Access-Control", "Vary"))]


def test_keys_are_changed_while_running_and_a_broken_file_changes_nothing(family: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-old\n")

    @hosted(server={"api_keys_file": str(file)})
    async def test(bench: Bench) -> None:
        async def statuses() -> list[int]:
            return [(await bench.http.get(f"{bench.url}/v1/models", headers=bearer(key))).status
                    for key in ("sk-old", "sk-new")]

        guard, server = bench.context.keys, bench.context.config.server
        assert await statuses() == [200, 401]
        file.write_text("sk-old\nsk-new\n")
        assert await statuses() == [200, 401]       # not before it is told
        guard.load(server)
        assert await statuses() == [200, 200]
        for broken in ("", "two words\n"):
            file.write_text(broken)
            with pytest.raises(ConfigError):
                guard.load(server)
            assert await statuses() == [200, 200]
        file.write_text("sk-new\n")
        guard.load(server)
        assert await statuses() == [401, 200]

    test(family)
