"""D15 to D22: image files by URL."""

from __future__ import annotations

import asyncio
import base64
import textwrap
import time
from urllib.parse import quote

from tests.field.cases import pictures
from tests.field.bench import SETTLE_S, Bench
from tests.field.table import case

COLOUR = "What colour is the circle?"
DEADLINE_S = 4.0        # media.timeout_s of the shared daemon
FETCHES_MAX = 32


@case("D15", "base64 with line breaks, without padding", "76 letters a line; no =; URL-safe; invalid letters",
      "200 and the same cache entry; 400 invalid_base64_image")
async def base64_forms(bench: Bench) -> None:
    data = pictures.noise(40, 41, seed=15) + b"\0"
    clean = base64.b64encode(data).decode()
    assert clean.endswith("=")
    assert (await bench.ask(data, "What is this?")).status == 200
    before = bench.status()["cache"]
    for form in ("\r\n".join(textwrap.wrap(clean, 76)), clean.rstrip("="), clean.replace("+", "-").replace("/", "_")):
        reply = await bench.ask(pictures.part("data:image/png;base64," + form), "What is this?")
        assert reply.status == 200, reply.text
    after = bench.status()["cache"]
    assert (after["hits"] - before["hits"], after["misses"]) == (3, before["misses"])
    for wrong in ("not!!!base64", "aGVsbG8=aGVsbG8=", "aGVsb\u00e9"):
        await bench.refused("invalid_base64_image", pictures.part("data:image/png;base64," + wrong), "What is this?")


@case("D16", "odd data: URLs", "no media type; a bare image; no ;base64; no comma; text/plain",
      "200, 200, then 400 each")
async def data_urls(bench: Bench) -> None:
    payload = base64.b64encode(pictures.circle("green")).decode()
    for head in ("data:;base64,", "data:image;base64,", "data:image;charset=x;base64,", "DATA:IMAGE/PNG;BASE64,"):
        assert await bench.answers(pictures.part(head + payload), COLOUR) == "green"
    for code, url in (("invalid_base64_image", "data:image/png," + payload), ("invalid_base64_image", "data:image/png"),
                      ("unsupported_image_media_type", "data:text/plain;base64,aGVsbG8="),
                      ("invalid_image_url", ""), ("invalid_image_url", "picture.png")):
        await bench.refused(code, pictures.part(url), COLOUR)


@case("D17", "a host that has no image", "404, 403, 500, HTML with 200, closed port, no such name",
      "400 failed_to_download_image; HTML: invalid_image_format", policy="its 5xx is a 400 too; not retried")
async def no_image(bench: Bench) -> None:
    for path, code in (("/status/404", "failed_to_download_image"), ("/status/403", "failed_to_download_image"),
                       ("/status/500", "failed_to_download_image"), ("/page", "invalid_image_format")):
        bench.host.seen.clear()
        await bench.refused(code, pictures.part(bench.host.url + path), COLOUR)
        assert bench.host.seen == [path] * 2        # once for each of the two requests
    for url in ("http://127.0.0.1:1/a.png", "http://no-such-host.invalid/a.png"):
        await bench.refused("failed_to_download_image", pictures.part(url), COLOUR)
    assert (await bench.get("/health")).body["status"] == "ok"


@case("D18", "a host that never answers", "64 such requests at once, and a text request; then a client that leaves",
      "400 each after media.timeout_s of its fetch; others are served; no fetch for clients that left")
async def silent_host(bench: Bench) -> None:
    part = pictures.part(bench.host.url + "/hang")
    began = time.monotonic()
    asked = [asyncio.create_task(bench.ask(part, COLOUR)) for _ in range(64)]
    while bench.host.hanging < FETCHES_MAX:
        await asyncio.sleep(0.01)
    assert (await bench.get("/health")).seconds < DEADLINE_S
    assert (await bench.ask("Hello", max_tokens=1)).seconds < DEADLINE_S
    assert await bench.answers(pictures.circle("blue", 90), COLOUR) == "blue"
    assert not any(task.done() for task in asked) or time.monotonic() - began > DEADLINE_S
    replies = await asyncio.gather(*asked)
    assert {(reply.status, reply.error["code"]) for reply in replies} == {(400, "failed_to_download_image")}
    # In two rounds, since the slots are half as many; one after another they would take minutes.
    rounds = sorted(reply.seconds for reply in replies)
    assert rounds[0] >= DEADLINE_S and rounds[-1] < SETTLE_S
    leaving = asyncio.create_task(bench.ask(part, COLOUR))
    while bench.host.hanging != 1:
        await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.wait([leaving])
    async with asyncio.timeout(DEADLINE_S / 2):
        while bench.host.hanging:
            await asyncio.sleep(0.01)


@case("D19", "URL of metadata, loopback, private address", "literals, short and odd spellings, names that lead there",
      "400 invalid_image_url at once, no socket opened", daemon="small",
      policy="media.fetch is off, allowlist or public; public by default")
async def private_addresses(bench: Bench) -> None:
    bench.host.seen.clear()
    port = bench.host.server_address[1]
    for url in ("http://169.254.169.254/latest/meta-data/", f"http://127.0.0.1:{port}/a.png", f"http://[::1]:{port}/",
                f"http://127.0.0.1:{bench.daemon.port}/metrics", f"http://[::ffff:127.0.0.1]:{port}/",
                "http://10.0.0.1/",
                f"http://localhost:{port}/", f"http://2130706433:{port}/", f"http://127.1:{port}/",
                f"http://0x7f000001:{port}/", f"http://0.0.0.0:{port}/", "http://192.168.0.1/", "http://[fd00::1]/"):
        replies = [await bench.ask(pictures.part(url), "What is this?") for _ in range(3)]
        assert {(reply.status, reply.error["code"]) for reply in replies} == {(400, "invalid_image_url")}, url
        assert min(reply.seconds for reply in replies) < 2      # connecting would last media.timeout_s
    assert bench.host.seen == []


@case("D20", "redirect to a blocked address", "302 to metadata, in two hops, to another port, to file:, in circles",
      "400; every hop is checked", policy="three hops at most")
async def redirects(bench: Bench) -> None:
    def to(target: str) -> str:
        return f"{bench.host.url}/to?url={target}"

    other_port = f"http://127.0.0.1:{bench.daemon.port}/metrics"
    for target in ("http://169.254.169.254/", to("http://169.254.169.254/"), other_port, "file:///etc/passwd",
                   "//169.254.169.254/"):
        await bench.refused("invalid_image_url", pictures.part(to(target)), COLOUR)
    assert await bench.answers(pictures.part(to(bench.host.url + "/circle.png")), COLOUR) == "blue"
    bench.host.seen.clear()
    await bench.refused("failed_to_download_image", pictures.part(bench.host.url + "/to?url=/to%3Furl=/to%253Furl="
                                                                  "/to%25253Furl=/circle.png"), COLOUR)
    assert len(bench.host.seen) == 2 * 4


def file_urls(allowed: str) -> list[str]:
    outside = f"file://{allowed}" + "/.." * allowed.count("/")
    return [f"{outside}/etc/passwd", f"{outside}/etc/no-such-file", f"{outside.replace('..', '%2e%2e')}/etc/passwd",
            f"{outside}/etc/no-such-folder/x", "file:///etc/passwd", f"file://host{allowed}/a.png"]


@case("D21", "file: where none are allowed", "a bare path, dots, percent-encoded dots, a host",
      "400, the same message whether or not the file exists", policy="off by default; media.folders allows some")
async def files(bench: Bench) -> None:
    await bench.refused("invalid_image_url", pictures.part("/etc/passwd"), COLOUR)
    replies = [await bench.refused("invalid_image_url", pictures.part(url), COLOUR) for url in file_urls("/allowed")]
    assert len({reply.error["message"] for reply in replies}) == 1


@case("D21f", "file: from below a folder", "the same, with the folder allowed; a file in it; a missing one",
      "400 with the same message for all outside; 200; image_file_not_found", daemon="small")
async def folder(bench: Bench) -> None:
    (bench.folder / "a.png").write_bytes(pictures.circle("green", 64))
    (bench.folder / "photo.jpg").write_bytes(pictures.turned(6))
    await bench.same_view((pictures.turned(6), pictures.part(f"file://{bench.folder}/photo.jpg")))
    (bench.folder / "link.png").symlink_to("/etc/passwd")
    assert await bench.answers(pictures.part(f"file://{bench.folder}/a.png"), COLOUR) == "green"
    urls = [*file_urls(str(bench.folder)), f"file://{bench.folder}/link.png"]
    replies = [await bench.refused("invalid_image_url", pictures.part(url), COLOUR) for url in urls]
    assert len({reply.error["message"] for reply in replies}) == 1
    await bench.refused("image_file_not_found", pictures.part(f"file://{bench.folder}/no.png"), COLOUR)
    (bench.folder / "link.png").unlink()


@case("D22s", "presigned URL", "%2F, %40, %3a and %7E in path and query, by itself and behind a redirect",
      "the host gets the user's bytes", policy="only bytes that a request line cannot hold are encoded")
async def presigned(bench: Bench) -> None:
    signed = "/a%2Fb/%40%3a%7E.png?X-Signature=%2F%2b%3D&X-Date=2026-12-01T00:00:00Z"
    bench.host.seen.clear()
    assert await bench.answers(pictures.part(bench.host.url + signed), COLOUR) == "green"
    moved = f"{bench.host.url}/to?url={quote(bench.host.url + signed, safe='')}"
    assert await bench.answers(pictures.part(moved), COLOUR) == "green"
    assert bench.host.seen[0] == bench.host.seen[2] == signed


@case("D22", "URL with letters outside ASCII", "/\u732b.png, plain and percent-encoded; a host of such letters",
      "the same object is fetched; no double encoding; 400 for the host")
async def letters(bench: Bench) -> None:
    bench.host.seen.clear()
    for path in ("/\u732b.png", "/%E7%8C%AB.png"):
        assert await bench.answers(pictures.part(bench.host.url + path), COLOUR) == "green"
    assert bench.host.seen == ["/%E7%8C%AB.png"] * 2
    for url in ("http://\u732b.invalid/a.png", "http://\udcff.invalid/", "http://xn--.invalid/", "http://a b/"):
        assert (await bench.ask(pictures.part(url), COLOUR)).status == 400
