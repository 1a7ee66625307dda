"""file: images: files below media.folders, and no information about others."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd.errors import ConfigError, MediaError
from epdd.families import ModelInfo
from epdd.frontend.images.local_files import Folders
from epdd.frontend.images.media import Media
from epdd.frontend.requests.messages import ImageRef
from epdd.settings.service import MediaSettings as Limits
from tests.frontend.images.image_host import Host, listed, run
from tests.frontend.images.test_media import EXECUTOR, PNG, fault, images

OUTSIDE = ("invalid_image_url", "The file: URL does not lead into a folder that this server reads images from")


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    """A folder with a picture, a subfolder with another, and a secret beside it."""
    folder = tmp_path / "allowed"
    (folder / "sub dir").mkdir(parents=True)
    (folder / "a.png").write_bytes(PNG)
    (folder / "sub dir" / "ü%.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "a.png").write_bytes(PNG)
    return folder


def refusal(folders: Folders, url: str) -> tuple[str, str]:
    with pytest.raises(MediaError) as caught:
        folders.read(url)
    return caught.value.code, caught.value.message


def test_files_inside(family: ModelInfo, allowed: Path) -> None:
    urls = [f"file://{allowed}/a.png", f"FILE://{allowed}/%61.png", f"file://{quote(str(allowed / 'sub dir/ü%.png'))}"]
    for url in urls:
        assert Folders([str(allowed)], 1 << 20).read(url) == PNG
    found = images(family, urls, folders=(str(allowed),))
    assert {image.key for image in found} == {images(family, [urls[0]], folders=(str(allowed) + "/",))[0].key}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("spelling", [
    "{secret}", "file://{secret}", "file://{allowed}/../secret.png", "file://{allowed}/%2e%2e/secret.png",
    "file://{allowed}/sub dir/%2E./%2e./secret.png", "file://host{allowed}/a.png", "file://localhost{allowed}/a.png",
    "file:{allowed}/a.png", "file:/{allowed}/a.png", "file://{allowed}", "file://{allowed}/",
    "file://{allowed}-not/a.png", "file://{allowed}//a.png", "file://{allowed}/./a.png",
    "file://{allowed}/a.png%00.jpg", "file://{allowed}%2f%2fa.png", "file://{allowed}/out/secret.png",
    "file://{allowed}/link.png", "file:///etc/passwd", "file:///", "file://", "file:",
    "file:///proc/self/environ", "file://{allowed}\\..\\secret.png",
])
def test_outside_looks_the_same_whether_or_not_it_is_there(family: ModelInfo, allowed: Path, spelling: str,
                                                           there: bool) -> None:
    secret = allowed.parent / "secret.png"
    (allowed / "out").symlink_to(allowed.parent)
    (allowed / "link.png").symlink_to(secret)
    if not there:
        secret.unlink()
    url = spelling.format(secret=secret, allowed=allowed)
    for folders in ((str(allowed),), ()):
        error = fault(family, url, folders=folders)
        assert error.code == "invalid_image_url" and str(allowed.parent) not in error.message
        if folders and url.startswith("file:"):
            assert (error.code, error.message) == OUTSIDE


def test_links_that_stay_inside(allowed: Path) -> None:
    (allowed / "link.png").symlink_to("sub dir/../a.png")
    (allowed / "sub").symlink_to(allowed / "sub dir")
    other = allowed.parent / "allowed-not"
    (allowed / "there").symlink_to(other)
    assert Folders([str(allowed)], 1 << 20).read(f"file://{allowed}/link.png") == PNG
    assert Folders([str(allowed)], 1 << 20).read(f"file://{allowed}/sub/%C3%BC%25.png") == PNG
    assert refusal(Folders([str(allowed)], 1 << 20), f"file://{allowed}/there/a.png") == OUTSIDE
    assert Folders([str(allowed), str(other)], 1 << 20).read(f"file://{allowed}/there/a.png") == PNG
    # A folder that is named by a link.
    (allowed.parent / "named").symlink_to(allowed)
    assert Folders([f"{allowed.parent}/named"], 1 << 20).read(f"file://{allowed.parent}/named/a.png") == PNG


def test_what_is_inside_and_no_readable_file(allowed: Path) -> None:
    folders = Folders([str(allowed)], len(PNG))
    os.mkfifo(allowed / "pipe.png")
    (allowed / "loop").symlink_to("loop")
    for name in ("missing.png", "sub dir", "pipe.png", "a.png/b", "loop", "x" * 300):
        code, message = refusal(folders, f"file://{allowed}/{name}")
        assert code in ("image_file_not_found", "invalid_image_url") and "allowed" not in message
    assert refusal(folders, f"file://{allowed}/pipe.png")[0] == "image_file_not_found"
    assert folders.read(f"file://{allowed}/a.png") == PNG       # exactly the limit
    (allowed / "a.png").write_bytes(PNG + b"!")
    assert refusal(folders, f"file://{allowed}/a.png")[0] == "image_file_too_large"
    with open(allowed / "sparse.png", "wb") as file:
        file.truncate(1 << 40)
    assert refusal(folders, f"file://{allowed}/sparse.png")[0] == "image_file_too_large"


def test_no_refused_source_leaves_a_descriptor(family: ModelInfo, allowed: Path) -> None:
    """Each refusal of files, of web servers and of data: URLs."""
    os.mkfifo(allowed / "pipe.png")
    (allowed / "large.png").write_bytes(PNG + bytes(9000))
    (allowed / "text.png").write_bytes(b"hello")
    (allowed / "link.png").symlink_to(allowed.parent / "secret.png")
    paths = ("sub dir", "", "pipe.png", "missing.png", "a.png/b", "sub dir/b.png", "large.png", "text.png", "link.png",
             "../secret.png")
    files = [f"file://{allowed}/{path}" for path in paths]
    datas = ["data:image/png;base64,AAAA", "data:image/png;base64,!", "data:text/html;base64,AAAA", "data:,", "blob:x"]

    async def test(host: Host) -> None:
        limits = Limits(**listed(host), timeout_s=0.5, max_redirects=1, max_file_bytes=8000, folders=(str(allowed),))
        webs = [host.url + path for path in (
            "/status/404", "/status/204", "/to?url=http://169.254.169.254/", "/to?url=file:///etc/passwd",
            "/to?url=/to%3Furl%3D/to%253Furl%253D/a", "/bytes/9000", "/cut", "/hang", "/drip", "/packed")]
        webs += ["http://127.0.0.1:1/", f"https://127.0.0.1:{host.port}/", "http://10.0.0.1/", "http://[::1/"]
        media = Media(limits, family, EXECUTOR)

        async def refuse(urls: list[str]) -> None:
            for url in urls:
                with pytest.raises(MediaError):
                    async with media.images([ImageRef(url, "p")], 0, 0):
                        pytest.fail(url)

        try:
            await asyncio.gather(*(refuse([url]) for url in [*webs, *files, *datas]))      # threads, resolver, loop
            before = await steady_descriptors()
            for url in [*files, *datas]:
                await refuse([url] * 3)
            assert await steady_descriptors() == before
            for _ in range(3):
                await asyncio.gather(*(refuse([url]) for url in webs))
            assert await steady_descriptors() == before
        finally:
            await media.close()

    run(test)


async def steady_descriptors() -> list[str]:
    """This process's open descriptors, once their number is stable: connections close with a delay."""
    found: list[str] = []
    for _ in range(100):
        await asyncio.sleep(0.05)
        seen = sorted(link for at in os.listdir("/proc/self/fd") if (link := _link(f"/proc/self/fd/{at}")))
        kinds = [link.partition(":")[0] for link in seen]
        if kinds == found:
            break
        found = kinds
    return found


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:     # the listing's own
        return ""


def test_links_that_change_between_look_and_use(allowed: Path) -> None:
    """Another process swaps a folder for a link to outside, as fast as it can."""
    secret = allowed.parent / "vault"
    secret.mkdir()
    (secret / "a.png").write_bytes(b"secret")
    turn, stop = allowed / "turn", threading.Event()
    (allowed / "real").mkdir()
    (allowed / "real" / "a.png").write_bytes(PNG)
    (allowed / "evil").symlink_to(secret)

    def swap() -> None:
        while not stop.is_set():
            for name in ("real", "evil"):
                os.rename(allowed / name, turn)
                os.rename(turn, allowed / name)

    thread = threading.Thread(target=swap)
    thread.start()
    folders, outcomes = Folders([str(allowed)], 1 << 20), set()
    try:
        for _ in range(1500):
            try:
                outcomes.add(folders.read(f"file://{turn}/a.png"))
            except MediaError as error:
                outcomes.add(error.code.encode())
    finally:
        stop.set()
        thread.join()
    assert b"secret" not in outcomes and outcomes <= {PNG, b"invalid_image_url", b"image_file_not_found"}


@pytest.mark.parametrize(("folder", "words"), [
    ("pictures", "not the full path"), ("/nowhere/pictures", "not the full path"), ("/", "every file"),
    ("/usr/..", "every file"), ("/etc/passwd", "not the full path")])
def test_settings_that_cannot_be_meant(folder: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Folders([folder], 1)


@given(st.text(st.sampled_from("./%2eE0fac\\~ü\0?#:")) | st.text())
def test_no_spelling_leads_out(tmp_path_factory: pytest.TempPathFactory, tail: str) -> None:
    root = tmp_path_factory.getbasetemp() / "spellings"
    (root / "in").mkdir(parents=True, exist_ok=True)
    (root / "ac").write_bytes(b"secret")
    (root / "in" / "ac").write_bytes(b"shown")
    try:
        assert Folders([f"{root}/in"], 100).read(f"file://{root}/in/{tail}") == b"shown"
    except MediaError as error:
        assert error.code in ("invalid_image_url", "image_file_not_found")
