"""Hosts that try to hold the event loop, and hosts that never answer."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvloop

from epdd.errors import MediaError
from epdd.frontend.images.fetch import URL_CHARS_MAX
from epdd.settings.service import MediaSettings

from tests.frontend.images.image_host import PNG, Host, fault, fetching, listed, run

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def flooding(first: bytes, again: bytes) -> Iterator[int]:
    """The port of a host that sends `first`, then `again` for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(1 << 16)
                try:
                    client.sendall(first)
                    while True:
                        client.sendall(again * (1 + (1 << 18) // len(again)))
                except OSError:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(("first", "again"), [
    (b"", b"HTTP/1.1 100 C\r\n\r\n"), (b"", b"HTTP/1.1 103 E\r\nLink: x\r\n\r\n"), (b"", b"\r\n"),
    (CHUNKED, b"1\r\nx\r\n"), (CHUNKED, b"1;" + b"a" * 40 + b"\r\nx\r\n"), (CHUNKED + b"1;", b"a"), (CHUNKED, b"0"),
    (OK, b"a: b\r\n"), (OK + b"a: ", b"b"), (b"HTTP/1.1 200 ", b"b"), (CHUNKED + b"0\r\n", b"a: b\r\n"),
], ids=["100", "103", "empty lines", "tiny chunks", "extensions", "one extension", "zeros", "headers", "one header",
        "reason", "trailers"])
def test_an_answer_that_is_more_framing_than_image_is_given_up(first: bytes, again: bytes) -> None:
    async def fetch(port: int) -> None:
        async with fetching(fetch="allowlist", allow=("127.0.0.1",), timeout_s=30) as fetcher:
            began = time.thread_time()
            with pytest.raises(MediaError, match="the connection failed"):      # and not that its time was over
                await fetcher.fetch(f"http://127.0.0.1:{port}/")
            assert time.thread_time() - began < 0.5

    with flooding(first, again) as port:
        uvloop.run(fetch(port))


def test_small_chunks_are_taken() -> None:
    """Of 16 bytes each, with a head as long as servers send."""
    answer = CHUNKED[:-2] + b"x: " + b"y" * 8000 + b"\r\n\r\n" + b"10\r\n" + b"z" * 16 + b"\r\n"

    async def go() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer + (b"10\r\n" + b"z" * 16 + b"\r\n") * 20_000 + b"0\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, fetching(fetch="allowlist", allow=("127.0.0.1",)) as fetcher:
            assert await fetcher.fetch(f"http://127.0.0.1:{port}/") == b"z" * 16 * 20_001

    uvloop.run(go())


def test_long_urls() -> None:
    async def test(host: Host) -> None:
        async with fetching(**listed(host)) as fetcher:
            assert await fetcher.fetch(f"{host.url}/{'a' * 7000}") == PNG
            began = time.thread_time()
            for path in ("a" * URL_CHARS_MAX, "../" * 2_600_000):
                assert await fault(fetcher, f"{host.url}/{path}") == "invalid_image_url"
            assert time.thread_time() - began < 0.1
        assert len(host.seen) == 1

    run(test)


def test_a_request_whose_hosts_never_answer_lets_others_go_first() -> None:
    async def test(host: Host) -> None:
        async with fetching(**listed(host), timeout_s=0.5, max_fetches=2) as fetcher:
            slow = [asyncio.create_task(fetcher.fetch(f"{host.url}/hang", request="slow")) for _ in range(8)]
            await asyncio.sleep(0)
            assert await fetcher.fetch(f"{host.url}/a.png", request="other") == PNG
            assert host.hanging <= 4
            await asyncio.gather(*slow, return_exceptions=True)

    run(test)


def test_lookups_have_threads_enough() -> None:
    """If a name server does not answer, its lookup outlives the fetch."""
    code = """if True:
        import asyncio, os, uvloop
        from epdd.settings.service import MediaSettings
        from epdd.frontend.images.fetch import Fetcher

        async def main():
            fetcher = Fetcher(MediaSettings(max_fetches=8))
            await asyncio.gather(fetcher.fetch("http://nowhere.invalid/"), return_exceptions=True)
            print(len(os.listdir("/proc/self/task")))
            await fetcher.close()

        uvloop.run(main())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 2 * MediaSettings(max_fetches=8).max_fetches
