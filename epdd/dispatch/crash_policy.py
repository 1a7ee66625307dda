"""What happens to an image or a prompt when the worker that had it crashes: it is tried again, alone, or rejected.

It is tried once more, isolated from others that were in a crashed worker, so that these do not crash with it again.
If the worker crashes the second time too, the item is rejected for `fleet.poison_s` seconds.  That may be wrong when
workers crash for other reasons, so nothing is remembered for ever.

Unlike caches this is shared by all API keys and salts: a crash takes everybody's work with it, and a client must not be
able to cause it again by another salt.
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
KEYS_MAX = 4096         # the oldest are forgotten first; half a megabyte when full


@dataclass
class Attempts:
    """To get one image or prompt through a worker."""

    begun: int = 0
    crashes: int = 0            # of workers that had it, by themselves

    @property
    def left(self) -> bool:
        return self.begun < ATTEMPTS_MAX


@dataclass
class CrashCounts:
    images: int = 0         # found to crash encoders
    prompts: int = 0        # found to crash prefill-decode workers
    refused: int = 0        # requests that met one known already


class CrashPolicy:
    """Attempts, isolation and rejection.  All calls come from the event loop."""

    def __init__(self, remember_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._remember_s = remember_s
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, Rejected]] = OrderedDict()   # by when they were found
        self._isolated = asyncio.Lock()         # held by the one prompt that is tried alone
        self.counts = CrashCounts()

    def image_lost(self, content: str, attempts: Attempts, error: EpddError, wanted: bool) -> EpddError | None:
        """What to tell all who wait for an image that an encoder did not encode; None: it is tried again, alone."""
        attempts.crashes += isinstance(error, WorkerLost) and error.crashed
        # Alone there may be memory enough, or on another device.
        if (error.retryable or isinstance(error, OutOfMemory)) and attempts.left and wanted:
            return None
        if attempts.crashes == ATTEMPTS_MAX:
            return self.reject_image(content)
        if isinstance(error, WorkerLost):
            error = WorkerLost(error.message)
            error.retryable = False         # nor by the request
        return error

    def prompt_lost(self, request: Request, attempts: Attempts, error: WorkerLost, begun: bool) -> None:
        """Returns if the request is tried again.  `begun`: tokens were sent.

        Raises Rejected if the prompt crashed two workers, else `error`.
        """
        attempts.crashes += error.crashed
        if attempts.crashes == ATTEMPTS_MAX and not begun:
            raise self.reject_prompt(request)
        sent = begun and not (request.whole and request.has_images)
        if sent or not attempts.left or not error.retryable:
            raise error

    def isolation(self, attempts: Attempts) -> Isolation:
        """For the next try of a prompt."""
        return Isolation(self._isolated if attempts.crashes else None)

    def reject_image(self, content: str) -> Rejected:
        """From now on; what to tell those who sent it."""
        self.counts.images += 1
        return self._add(content, Rejected("an encoder died over this image, twice", code="image_rejected"))

    def reject_prompt(self, request: Request) -> Rejected:
        """From now on; what to tell its sender."""
        self.counts.prompts += 1
        return self._add(_prompt_key(request), Rejected("a worker died over this prompt, twice"))

    def _add(self, key: str, error: Rejected) -> Rejected:
        log.error("%s key=%s refused for seconds=%g: %s", error.code, key, self._remember_s, error.message)
        self._known.pop(key, None)
        self._known[key] = self._clock() + self._remember_s, error
        while len(self._known) > KEYS_MAX:
            self._known.popitem(last=False)
        return error

    def check(self, request: Request) -> None:
        """Raises Rejected if the prompt or an image of it is known to crash workers."""
        if self.entries:    # seldom: then no prompt needs to be hashed
            self._check([*(image.content for image in request.images), _prompt_key(request)])

    def _check(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self._known:
                self.counts.refused += 1
                error = self._known[key][1]
                raise Rejected(error.message, code=error.code)

    @property
    def isolating(self) -> bool:
        """Whether a prompt is tried alone now."""
        return self._isolated.locked()

    @property
    def entries(self) -> int:
        """How many are remembered."""
        now = self._clock()
        while self._known and next(iter(self._known.values()))[0] <= now:
            self._known.popitem(last=False)
        return len(self._known)


class Isolation:
    """The right to be the only prompt with a crash behind it before its first token, ended once; without lock, none."""

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
    """Of all that is read: images are equal placeholders among the tokens, and a grammar is compiled with them."""
    digest = hashlib.blake2b(array("i", request.tokens).tobytes(), digest_size=20)
    for part in (request.sampling.grammar, *(image.content for image in request.images)):
        digest.update(b"\0" + part.encode())
    return f"prompt {digest.hexdigest()}"
