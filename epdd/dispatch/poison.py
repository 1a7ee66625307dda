"""Content that killed workers: refused for a while instead of handed to the next worker.

What was lost with a worker is tried once more, apart from other suspects; what is lost again is taken for the
cause.  That may be wrong when workers die for other reasons, so nothing is remembered for ever.

Unlike caches this is shared by all API keys and salts: a worker that dies takes everybody's work with it, and a client
must not be able to kill again by another salt.
"""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from epdd.dispatch.request import Request
from epdd.errors import Rejected

log = logging.getLogger(__name__)

KEYS_MAX = 4096         # the oldest are forgotten first; half a megabyte when full


@dataclass
class PoisonCounts:
    images: int = 0         # found to kill encoders
    prompts: int = 0        # found to kill prefill-decode workers
    refused: int = 0        # requests that met one known already


class Poison:
    """Keys of images and prompts.  All calls come from the event loop."""

    def __init__(self, remember_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._remember_s = remember_s
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, Rejected]] = OrderedDict()   # by when they were found
        self.counts = PoisonCounts()

    def add_image(self, key: str) -> Rejected:
        """An image that killed two encoders; what to tell those who sent it."""
        self.counts.images += 1
        return self._add(key, Rejected("an encoder died over this image, twice", code="image_rejected"))

    def add_prompt(self, request: Request) -> Rejected:
        """A prompt that killed two prefill-decode workers; what to tell its sender."""
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
        """Raises Rejected if the prompt or an image of it is known to kill."""
        if self.entries:    # seldom: then no prompt needs to be hashed
            self._check([*(image.content for image in request.images), _prompt_key(request)])

    def _check(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self._known:
                self.counts.refused += 1
                error = self._known[key][1]
                raise Rejected(error.message, code=error.code)

    @property
    def entries(self) -> int:
        """How many are remembered."""
        now = self._clock()
        while self._known and next(iter(self._known.values()))[0] <= now:
            self._known.popitem(last=False)
        return len(self._known)


def _prompt_key(request: Request) -> str:
    """Of all that is read: images are equal placeholders among the tokens, and a grammar is compiled with them."""
    digest = hashlib.blake2b(array("i", request.tokens).tobytes(), digest_size=20)
    for part in (request.sampling.grammar, *(image.content for image in request.images)):
        digest.update(b"\0" + part.encode())
    return f"prompt {digest.hexdigest()}"
