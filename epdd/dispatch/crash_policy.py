"""Retries each image or prompt of a crashed worker once, alone; rejects it if its worker crashes again.

It is retried alone so that a second crash loses no other work.  A rejection lasts `fleet.poison_s` seconds, because a
worker may also have crashed for another reason.

All API keys and salts share the rejections, unlike caches: a crash loses the work of every client, and a client must
not be able to repeat it with another salt.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from epdd.dispatch.request import Request
from epdd.errors import EpddError, OutOfMemory, Rejected, WorkerLost

log = logging.getLogger(__name__)

ATTEMPTS_MAX = 2
KEYS_MAX = 4096         # rejections kept, the newest; half a megabyte


@dataclass
class Attempts:
    """Attempts to process one image or prompt."""

    begun: int = 0
    crashes: int = 0            # workers that crashed with it; those that the daemon ended do not count

    @property
    def left(self) -> bool:
        return self.begun < ATTEMPTS_MAX


@dataclass
class CrashCounts:
    images: int = 0         # images that crashed encoders
    prompts: int = 0        # prompts that crashed prefill-decode workers
    refused: int = 0        # requests refused for one of those


class CrashPolicy:
    """Attempts, isolation and rejection.  All calls come from the event loop."""

    def __init__(self, remember_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._remember_s = remember_s
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, Rejected]] = OrderedDict()   # key -> end, error; oldest first
        self._isolated = asyncio.Lock()         # held by the prompt that is retried alone
        self.counts = CrashCounts()

    def image_lost(self, content: str, attempts: Attempts, error: EpddError, wanted: bool) -> EpddError | None:
        """The error of all requests for an image that an encoder did not encode; None: it is retried alone.

        `wanted`: a request still needs the image.
        """
        attempts.crashes += isinstance(error, WorkerLost) and error.crashed
        # Alone, or on another device, it may have enough memory.
        if (error.retryable or isinstance(error, OutOfMemory)) and attempts.left and wanted:
            return None
        if attempts.crashes == ATTEMPTS_MAX:
            return self.reject_image(content)
        if isinstance(error, WorkerLost):
            error = WorkerLost(error.message)
            error.retryable = False         # the request is not retried either
        return error

    def prompt_lost(self, request: Request, attempts: Attempts, error: WorkerLost, begun: bool) -> None:
        """Returns if the request is retried.  `begun`: tokens were sent.

        Raises Rejected if the prompt crashed ATTEMPTS_MAX workers, else `error`.
        """
        attempts.crashes += error.crashed
        if attempts.crashes == ATTEMPTS_MAX and not begun:
            raise self.reject_prompt(request)
        sent = begun and not (request.whole and request.has_images)
        if sent or not attempts.left or not error.retryable:
            raise error

    def isolation(self, attempts: Attempts) -> Isolation:
        """For the next attempt of a prompt."""
        return Isolation(self._isolated if attempts.crashes else None)

    def reject_image(self, content: str) -> Rejected:
        """Reject an image from now on; returns the error for its clients."""
        self.counts.images += 1
        return self._add(content, Rejected("an encoder crashed on this image, twice", code="image_rejected"))

    def reject_prompt(self, request: Request) -> Rejected:
        """Reject a prompt from now on; returns the error for its client."""
        self.counts.prompts += 1
        return self._add(_prompt_key(request), Rejected("a worker crashed on this prompt, twice"))

    def _add(self, key: str, error: Rejected) -> Rejected:
        log.error("%s key=%s rejected for seconds=%g: %s", error.code, key, self._remember_s, error.message)
        self._known.pop(key, None)
        self._known[key] = self._clock() + self._remember_s, error
        while len(self._known) > KEYS_MAX:
            self._known.popitem(last=False)
        return error

    def check(self, request: Request) -> None:
        """Raises Rejected if the prompt or an image of it is known to crash workers."""
        if self.entries:    # rarely; without any, no prompt is hashed
            self._check([*(image.content for image in request.images), _prompt_key(request)])

    def _check(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self._known:
                self.counts.refused += 1
                error = self._known[key][1]
                raise Rejected(error.message, code=error.code)

    @property
    def isolating(self) -> bool:
        """Whether a prompt is being retried alone."""
        return self._isolated.locked()

    @property
    def entries(self) -> int:
        """Rejections in force."""
        now = self._clock()
        while self._known and next(iter(self._known.values()))[0] <= now:
            self._known.popitem(last=False)
        return len(self._known)


class Isolation:
    """Lets one prompt that crashed a worker run at a time, until its first token.  Without a lock it does nothing."""

    def __init__(self, lock: asyncio.Lock | None) -> None:
        self._lock = lock
        self._taken = False

    async def begin(self) -> None:
        if self._lock is not None:
            await self._lock.acquire()
            self._taken = True

    def end(self) -> None:
        if self._lock is not None and self._taken:
            self._taken = False
            self._lock.release()


def _prompt_key(request: Request) -> str:
    """Hash of tokens, grammar and images: the placeholders of different images are equal tokens."""
    digest = hashlib.blake2b(array("i", request.tokens).tobytes(), digest_size=20)
    for part in (request.sampling.grammar, *(image.content for image in request.images)):
        digest.update(b"\0" + part.encode())
    return f"prompt {digest.hexdigest()}"
