"""A request as dispatch sees it: token ids, images by their bytes, sampling.  Made by the frontend."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from epdd.wire import Sampling


@dataclass(frozen=True)
class Image:
    """One image of a request, its header read and its grid computed; pixels are still encoded."""

    data: bytes                     # the image file
    width: int                      # upright pixels
    height: int
    grid: tuple[int, int, int]      # (t, h, w) in patches
    rows: int                       # placeholder tokens
    key: str                        # of its embedding: what it depends on (`content`), then `salt`
    orientation: int = 1            # EXIF's: how its stored pixels are turned upright
    salt: str = ""                  # the request's

    @property
    def content(self) -> str:
        """Hash over bytes, processor options, model and background: the same for all who send this image."""
        return self.key.removesuffix(self.salt)

    @property
    def patches(self) -> int:
        """The cost of encoding it."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def stored(self) -> tuple[int, int]:
        """Width and height before it is turned upright."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


@dataclass(frozen=True)
class Placed:
    """Where an image's placeholder rows lie in the token list."""

    start: int
    image: int                      # index into Request.images


@dataclass(frozen=True)
class Request:
    """Everything pipeline.run needs; nothing in it refers to HTTP."""

    id: str
    tokens: list[int]               # placeholders expanded
    sampling: Sampling              # max_tokens already bounded by the context
    images: list[Image] = field(default_factory=list)
    spans: list[Placed] = field(default_factory=list)
    n: int = 1                      # answers
    deadline: float = 0.0           # loop.time() by which it must be done; 0: none
    arrived: float = field(default_factory=time.monotonic)
    client_id: str = ""             # the client's own name for it, if any; need not be unique
    salt: str = ""                  # caches are shared by requests of the same salt only; opaque
    tenant: str = ""                # whose it is: places are shared fairly between tenants; opaque
    whole: bool = False             # nobody sees a token before the last: what a lost worker began can begin anew

    @property
    def has_images(self) -> bool:
        """Whether all that were sent are still there: its owner may let go of them after the first token."""
        return bool(self.images) or not self.spans
