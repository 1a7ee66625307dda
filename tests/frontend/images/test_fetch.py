"""Images by URL: hosts, time, size, and that no other address is dialled."""

from __future__ import annotations

import asyncio
import gzip
import time
from typing import Any

import aiohttp
import pytest

from tests.frontend.images.image_host import PNG, Host, fault, fetching, hosting, listed, run


def test_an_allowed_host_is_fetched_from() -> None:
    async def test(host: Host) -> None:
        async with fetching(**listed(host)) as fetcher:
            assert await fetcher.fetch(f"{host.url}/a.png") == PNG
            assert await fetcher.fetch(f"http://LOCALHOST:{host.port}/a.png") == PNG

    run(test)


SIGNED = ("/a%2Fb/%40%3a%7E%7e/+a%2B,;=@:!$&'()*.png"
          "?X-Sig=%2F%2f%40%3A%3a%7E%7e%26+%2B%20&X-Date=2026:12/01?&e=&empty&q=%C3%BC%e7&%zz=%&[]{}|^`\"<>")


def test_paths_and_queries_keep_their_bytes() -> None:
    """A presigned URL's signature covers them."""
    async def test(host: Host) -> None:
        async with fetching(**listed(host)) as fetcher:
            paths = ("/%E7%8C%AB.png", "/%e7%8c%ab.png?q=a%20b", "/a/../b/./c%2e%2e//d.png", "/", "/?", SIGNED)
            for path in paths:
                assert await fetcher.fetch(host.url + path + "#part") == PNG
            assert host.seen == [*paths[:4], "/", SIGNED]
            host.seen.clear()
            # Redirected: to another host's URL, to a path, and to one beside this.
            for target, seen in ((host.url + SIGNED, SIGNED), (SIGNED, SIGNED), ("a%2Fb%7E?c=%2f", "/a%2Fb%7E?c=%2f"),
                                 ("?c=%40", "/to?c=%40")):
                host.location = target
                assert await fetcher.fetch(f"{host.url}/to?url=") == PNG
                assert host.seen.pop() == seen

    run(test)


def test_letters_outside_ascii_are_encoded() -> None:
    async def test(host: Host) -> None:
        async with fetching(**listed(host)) as fetcher:
            for path in ("/\u732b.png?q=\xfc b", "/%E7%8C%AB.png?q=%C3%BC%20b"):
                assert await fetcher.fetch(host.url + path) == PNG
                host.location = path
                assert await fetcher.fetch(f"{host.url}/to?url=") == PNG
            assert {path for path in host.seen if path[:3] != "/to"} == {"/%E7%8C%AB.png?q=%C3%BC%20b"}
            # No line of the request's head can be added.
            assert await fetcher.fetch(f"{host.url}/a\r\nX: y\0\t.png") == PNG
            assert host.seen[-1] == "/aX:%20y%00.png"

    run(test)


def test_host_names_are_looked_up_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        asked = []

        async def lookup(name: str, port: int, **options: Any) -> list[Any]:
            asked.append(name)
            return [(2, 1, 6, "", ("127.0.0.1", port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup, raising=False)
        async with hosting() as host, fetching(fetch="allowlist", allow=("127.0.0.0/8",)) as fetcher:
            assert await fetcher.fetch(f"http://b\xfccher.example:{host.port}/a%2Fb") == PNG
            assert asked == ["xn--bcher-kva.example"] and host.seen == ["/a%2Fb"]
        async with fetching(fetch="public") as fetcher:     # what is dialled is what is checked
            assert await fault(fetcher, "http://b\xfccher.example/a%2Fb") == "invalid_image_url"

    asyncio.run(go())


@pytest.mark.parametrize("url", [
    "http://", "http:///a.png", "http://[::1", "http://a b/", "http://exa\u0000mple/", "http://x:99999/",
    "http://" + "\u732b" * 300 + "/", "//host/a.png", "http://%zz/", "http://x:port/",
])
def test_malformed_urls(url: str) -> None:
    async def test(host: Host) -> None:
        async with fetching() as fetcher:
            assert await fault(fetcher, url) in ("invalid_image_url", "failed_to_download_image")

    run(test)


@pytest.mark.parametrize("url", [
    "http://169.254.169.254/", "http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://[::1]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/", "http://127.1:{port}/", "http://2130706433:{port}/",
    "http://0x7f000001:{port}/", "http://0177.0.0.1:{port}/", "http://10.0.0.1/", "http://0.0.0.0:{port}/",
    "http://user:pass@127.0.0.1:{port}/", "http://[fe80::1%25lo]/", "http://\uff11\uff12\uff17.0.0.1:{port}/",
])
def test_blocked_addresses_open_no_socket(url: str) -> None:
    async def test(host: Host) -> None:
        async with fetching(fetch="public") as fetcher:
            assert await fault(fetcher, url.format(port=host.port)) == "invalid_image_url"
        assert host.seen == []

    run(test)


def test_switched_off() -> None:
    async def test(host: Host) -> None:
        async with fetching(fetch="off") as fetcher:
            assert await fault(fetcher, f"{host.url}/a.png") == "invalid_image_url"
        assert host.seen == []

    run(test)


def test_another_port_of_a_listed_host_is_blocked() -> None:
    async def test(host: Host) -> None:
        async with fetching(fetch="allowlist", allow=(f"127.0.0.1:{host.port + 1}",)) as fetcher:
            assert await fault(fetcher, f"{host.url}/a.png") == "invalid_image_url"
        assert host.seen == []

    run(test)


@pytest.mark.parametrize("status", [403, 404, 500, 503, 204, 304])
def test_other_answers_than_200(status: int) -> None:
    async def test(host: Host) -> None:
        async with fetching(**listed(host)) as fetcher:
            assert await fault(fetcher, f"{host.url}/status/{status}") == "failed_to_download_image"
        assert len(host.seen) == 1

    run(test)


def test_redirects_are_followed_and_checked() -> None:
    async def test(host: Host) -> None:
        def to(url: str) -> str:
            return f"{host.url}/to?url={url.replace('?', '%3F').replace('=', '%3D').replace('&', '%26')}"

        async with fetching(**listed(host), max_redirects=3) as fetcher:
            assert await fetcher.fetch(to("/a.png")) == PNG
            assert await fetcher.fetch(to(to(f"{host.url}/a.png"))) == PNG
            for target in ("http://169.254.169.254/", f"http://127.0.0.1:{host.port + 1}/", "file:///etc/passwd",
                           "ftp://127.0.0.1/", "//10.0.0.1/", f"http://[::1]:{host.port}/", ""):
                before = len(host.seen)
                assert await fault(fetcher, to(target)) in ("invalid_image_url", "failed_to_download_image")
                assert len(host.seen) <= before + 4
            assert await fault(fetcher, to(to("http://169.254.169.254/"))) == "invalid_image_url"

    run(test)


def test_redirects_end() -> None:
    async def test(host: Host) -> None:
        async with fetching(**listed(host), max_redirects=2) as fetcher:
            loop = f"{host.url}/to?url=/to%3Furl%3D/to%253Furl%253D/a.png"
            assert await fault(fetcher, loop) == "failed_to_download_image"
        assert len(host.seen) == 3
        async with fetching(**listed(host), max_redirects=0) as fetcher:
            assert await fault(fetcher, f"{host.url}/to?url=/a.png") == "failed_to_download_image"

    run(test)


@pytest.mark.parametrize("path", ["/hang", "/drip"])
def test_the_deadline_is_for_the_whole_fetch(path: str) -> None:
    async def test(host: Host) -> None:
        async with fetching(**listed(host), timeout_s=0.3) as fetcher:
            codes = await asyncio.gather(*(fault(fetcher, host.url + path) for _ in range(20)))
            assert set(codes) == {"failed_to_download_image"}
            assert await fetcher.fetch(f"{host.url}/a.png") == PNG

    run(test)


def test_only_so_many_at_once_and_none_is_lost() -> None:
    async def test(host: Host) -> None:
        async with fetching(**listed(host), timeout_s=0.2, max_fetches=3) as fetcher:
            started = time.perf_counter()
            await asyncio.gather(*(fault(fetcher, f"{host.url}/hang") for _ in range(6)))
            assert time.perf_counter() - started > 0.35     # two turns; waiting for one is not fetching
            assert host.hanging == 6

    run(test)


def test_cancelling_frees_the_slot_and_the_connection() -> None:
    async def test(host: Host) -> None:
        async with fetching(**listed(host), max_fetches=1) as fetcher:
            task = asyncio.create_task(fetcher.fetch(f"{host.url}/hang"))
            while not host.hanging:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await fetcher.fetch(f"{host.url}/a.png") == PNG
            while not host.left:
                await asyncio.sleep(0.005)

    run(test)


def test_the_size_is_bounded_while_reading() -> None:
    async def test(host: Host) -> None:
        async with fetching(**listed(host), max_file_bytes=50_000) as fetcher:
            assert len(await fetcher.fetch(f"{host.url}/bytes/50000")) == 50_000
            assert await fault(fetcher, f"{host.url}/bytes/51000") == "image_file_too_large"
            assert await fault(fetcher, f"{host.url}/bytes/100000000") == "image_file_too_large"

    run(test)


def test_packed_answers_are_not_unpacked() -> None:
    async def test(host: Host) -> None:
        async with fetching(**listed(host)) as fetcher:
            assert await fetcher.fetch(f"{host.url}/packed") == gzip.compress(PNG)

    run(test)


def test_broken_connections() -> None:
    async def test(host: Host) -> None:
        async with fetching(fetch="allowlist", allow=("127.0.0.1", "nowhere.invalid")) as fetcher:
            assert await fault(fetcher, f"{host.url}/cut") == "failed_to_download_image"
            assert await fault(fetcher, "http://127.0.0.1:1/") == "failed_to_download_image"
            assert await fault(fetcher, "http://nowhere.invalid/") == "failed_to_download_image"
            assert await fault(fetcher, f"https://127.0.0.1:{host.port}/") == "failed_to_download_image"

    run(test)


def test_a_name_is_looked_up_once_and_its_checked_address_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(host: Host) -> None:
        answers = iter([["127.0.0.1"], ["10.0.0.1"]])     # a name with changing addresses
        asked = []

        async def lookup(name: str, port: int, **options: Any) -> list[Any]:
            asked.append(name)
            return [(2, 1, 6, "", (address, port)) for address in next(answers)]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup, raising=False)
        async with fetching(fetch="allowlist", allow=("127.0.0.0/8",)) as fetcher:
            assert await fetcher.fetch(f"http://rebind.example:{host.port}/a.png") == PNG
            assert asked == ["rebind.example"]
            assert await fault(fetcher, f"http://rebind.example:{host.port}/a.png") == "invalid_image_url"
        assert len(host.seen) == 1

    async def go() -> None:     # asyncio's own loop: uvloop's methods cannot be replaced
        async with hosting() as host:
            await test(host)

    asyncio.run(go())


def test_one_blocked_address_among_several_blocks_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async def lookup(name: str, port: int, **options: Any) -> list[Any]:
            return [(2, 1, 6, "", (address, port)) for address in ("93.184.216.34", "127.0.0.1")]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup, raising=False)
        async with fetching(fetch="public") as fetcher:
            assert await fault(fetcher, "http://mixed.example/a.png") == "invalid_image_url"

    asyncio.run(go())


def test_no_proxy_and_no_cookies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def test(host: Host) -> None:
        async with fetching(**listed(host)) as fetcher:
            assert await fetcher.fetch(f"{host.url}/a.png") == PNG
            assert isinstance(fetcher._session.cookie_jar, aiohttp.DummyCookieJar)

    run(test)
