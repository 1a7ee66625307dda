"""The images of a request: their files by data:, http(s): or file: URL, then size, cost and cache key from the header.

All limits on images are checked here: their number, bytes and pixels.  No pixel is decoded here.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from epdd.dispatch.request import Image
from epdd.errors import BadRequest, EpddError, MediaError
from epdd.families import ModelInfo
from epdd.frontend.images import image_header
from epdd.frontend.images.byte_budget import Budget, Share
from epdd.frontend.images.fetch import Fetcher
from epdd.frontend.images.local_files import Folders
from epdd.frontend.requests.messages import ImageRef
from epdd.settings.service import MediaSettings as Limits
from epdd.wire import content_hash

BACKGROUND = "white"        # under transparent pixels, in encoders: part of the cache key
_INLINE_BYTES = 1 << 16     # under a millisecond of decoding and hashing: larger files go to a thread
_HEAD_CHARS_MAX = 1000      # of a data: URL, before its data
_BASE64_STEP = 1 << 20      # characters decoded before other threads may run

_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_WHITE_SPACE = b" \t\r\n"


@dataclass
class HeldImages:
    """A request's images, in order, and their bytes' share of the budget."""

    images: list[Image]
    share: Share

    def offer(self) -> None:
        """Release them once other requests need the room: their first try goes before this request's retry."""
        self.share.offer(self.release)

    def keep(self) -> None:
        """Undo `offer`: a retry needs them."""
        self.share.keep()

    def release(self) -> None:
        """Free the images before the request ends: they will not be encoded again."""
        self.images.clear()
        self.share.shrink(0)


class Media:
    """Turns image references into images, for all requests."""

    def __init__(self, limits: Limits, family: ModelInfo, executor: Executor) -> None:
        """Must be made inside the running loop.  Raises ConfigError."""
        self._limits = limits
        self._family = family
        self._executor = executor
        self._folders = Folders(limits.folders, limits.max_file_bytes)      # first: it may raise, and needs no close
        self._fetcher = Fetcher(limits)
        self.budget = Budget(limits.max_inflight_bytes)

    async def close(self) -> None:
        await self._fetcher.close()

    @asynccontextmanager
    async def images(self, refs: Sequence[ImageRef], min_pixels: int, max_pixels: int,
                     salt: str = "") -> AsyncIterator[HeldImages]:
        """The images; their bytes count against the budget until the block ends or they are released.

        Only images of the same salt share an embedding.

        Raises BadRequest for too many, before any is fetched; MediaError with the part as `param`.
        """
        if len(refs) > self._limits.max_images:
            raise BadRequest(f"The conversation holds {len(refs)} images; at most {self._limits.max_images} "
                             "are allowed", param="messages")
        async with self.budget.hold(sum(self._bytes_max(ref.url) for ref in refs)) as share:
            images = await self._all(refs, min_pixels, max_pixels, share)
            images = [replace(image, key=image.key + salt, salt=salt) for image in images] if salt else images
            share.shrink(sum(len(image.data) for image in images))
            yield HeldImages(images, share)

    async def _all(self, refs: Sequence[ImageRef], min_pixels: int, max_pixels: int, share: Share) -> list[Image]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._image(ref, min_pixels, max_pixels, share)) for ref in refs]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _image(self, ref: ImageRef, min_pixels: int, max_pixels: int, share: Share) -> Image:
        try:
            source: str | bytes = ref.url
            if _scheme(ref.url) in ("http", "https"):
                source = await self._fetcher.fetch(ref.url, share.grow, share)
            elif _scheme(ref.url) == "file":
                source = await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._folders.read, ref.url)
            elif _scheme(ref.url) != "data":
                raise MediaError("An image URL must begin with data:, http:, https: or file:",
                                 code="invalid_image_url")
            if len(source) <= _INLINE_BYTES:
                return self._read(source, min_pixels, max_pixels)
            return await asyncio.get_running_loop().run_in_executor(
                self._executor, self._read, source, min_pixels, max_pixels)
        except EpddError as error:
            error.param = ref.param
            raise

    def _read(self, source: str | bytes, min_pixels: int, max_pixels: int) -> Image:
        """`source` is a data: URL or the file itself."""
        data = source if isinstance(source, bytes) else data_url(source)
        if len(data) > self._limits.max_file_bytes:
            raise MediaError(f"The image file is over the limit of {self._limits.max_file_bytes} bytes",
                             code="image_file_too_large")
        header = image_header.read(data)
        width, height = header.upright
        if width * height > self._limits.max_pixels:
            raise MediaError(f"The image has {width} x {height} pixels; at most {self._limits.max_pixels} "
                             "are allowed", code="image_too_large")
        grid = self._family.grid(width, height, min_pixels, max_pixels)
        # All that an embedding depends on, so that different embeddings have different keys.
        facts = f"{self._family.folder}\0{min_pixels}\0{max_pixels}\0{BACKGROUND}\0".encode()
        key = f"{content_hash(data)}{hashlib.blake2b(facts, digest_size=8).hexdigest()}"
        return Image(data, width, height, grid, self._family.rows(grid), key, header.orientation,
                     work=self._family.patches(grid))

    def _bytes_max(self, url: str) -> int:
        """Bytes to reserve before the file is read."""
        if _scheme(url) in ("http", "https"):
            return 0    # counted as it comes: a host that never answers must not hold room
        return len(url) * 3 // 4 if _scheme(url) == "data" else self._limits.max_file_bytes


def data_url(url: str) -> bytes:
    """The bytes of a base64 `data:` URL.

    Line breaks, missing padding and the URL-safe alphabet are accepted; the media type may be missing, a
    bare `image`, or any image's, since the bytes decide the format.  Raises MediaError.
    """
    comma = url.find(",", 0, _HEAD_CHARS_MAX)
    kind, *options = url[5:max(comma, 5)].lower().split(";")
    if comma < 0 or "base64" not in (option.strip() for option in options):
        raise MediaError("A data: URL must hold base64: data:image/jpeg;base64,...", code="invalid_base64_image")
    kind = kind.strip()
    if kind not in ("", "image", "application/octet-stream") and not kind.startswith("image/"):
        raise MediaError("The data: URL's media type is not an image's", code="unsupported_image_media_type")
    try:
        return _base64(url[comma + 1:])
    except ValueError:      # binascii.Error, or letters outside ASCII
        raise MediaError("The image is not valid base64", code="invalid_base64_image") from None


def _base64(payload: str) -> bytes:
    """In steps: decoding holds the interpreter, and a large image at once would block the event loop."""
    payload = payload.rstrip("= \t\r\n")
    pieces, rest = [], b""
    for at in range(0, len(payload), _BASE64_STEP):
        letters = rest + payload[at:at + _BASE64_STEP].encode("ascii").translate(_URL_SAFE, _WHITE_SPACE)
        if b"=" in letters:
            raise ValueError("padding inside")
        whole = len(letters) // 4 * 4
        pieces.append(binascii.a2b_base64(letters[:whole], strict_mode=True))
        rest = letters[whole:]
    pieces.append(binascii.a2b_base64(rest + b"=" * (-len(rest) % 4), strict_mode=True))
    return b"".join(pieces)


def _scheme(url: str) -> str:
    return url[:8].partition(":")[0].lower()
