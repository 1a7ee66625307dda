"""A request as the frontend hands it to dispatch: token ids, image files, sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from epdd.dispatch.request_record import ImageRecord, RequestRecord
from epdd.wire import Run, Sampling


@dataclass(frozen=True)
class Image:
    """One image of a request: the file, and the grid computed from its header.  Workers decode the pixels."""

    data: bytes                     # the image file
    width: int                      # upright pixels
    height: int
    grid: tuple[int, int, int]      # (t, h, w) in patches
    rows: int                       # placeholder tokens
    key: str                        # of its embedding in the encoder cache: `content`, then `salt`
    orientation: int = 1            # EXIF orientation of the stored pixels
    salt: str = ""                  # the request's
    work: int = 0                   # patches; 0: as many as the grid has

    @property
    def content(self) -> str:
        """Hash over bytes, processor options, model and background: the same for all clients."""
        return self.key.removesuffix(self.salt)

    @property
    def patches(self) -> int:
        """Its patches: the cost of encoding it."""
        return self.work or math.prod(self.grid)

    @property
    def stored(self) -> tuple[int, int]:
        """Width and height before EXIF rotation."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


@dataclass(frozen=True)
class Placed:
    """Where the tokens of an image begin in the token list."""

    start: int
    image: int                      # index into Request.images
    runs: tuple[Run, ...] = ()      # of image tokens, from `start`; (): one, at `start`


@dataclass(frozen=True)
class Request:
    """Everything that `Pipeline.run` needs; nothing in it refers to HTTP."""

    record: RequestRecord           # written as the request goes along
    tokens: list[int]               # placeholders expanded
    sampling: Sampling              # max_tokens already bounded by the context
    images: list[Image] = field(default_factory=list)
    spans: list[Placed] = field(default_factory=list)
    n: int = 1                      # answers
    deadline: float = 0.0           # loop.time() by which it must be done; 0: none
    salt: str = ""                  # only requests of the same salt share caches; opaque
    tenant: str = ""                # tenants share encoders and sequence slots fairly; opaque
    whole: bool = False             # the client gets no token before the last, so the answer can start again

    def __post_init__(self) -> None:
        self.record.prompt_tokens = len(self.tokens)
        self.record.images = [ImageRecord(image.patches, image.rows) for image in self.images]

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def has_images(self) -> bool:
        """False after the frontend has freed the image files, which it may do from the first token on."""
        return bool(self.images) or not self.spans
