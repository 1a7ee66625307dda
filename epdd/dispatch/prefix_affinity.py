"""Estimates how much of a prompt each prefill-decode worker has in its prefix cache, from the prompts it was given.

The estimate only chooses the worker.  The worker compares tokens itself (`worker/language/prefix_cache.py`), and
answers report what it found.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from weakref import WeakKeyDictionary

from epdd.dispatch.request import Request
from epdd.fleet.worker import Worker

BLOCK = 64          # tokens; prefixes are compared in whole blocks


def chain(request: Request) -> list[bytes]:
    """One digest for each whole block of the prompt, over the salt and all tokens and images up to the block's end."""
    digests: list[bytes] = []
    tokens, spans, last = array("i", request.tokens), iter(request.spans), request.salt.encode()
    span = next(spans, None)
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        digest = blake2b(last, digest_size=16)
        digest.update(tokens[end - BLOCK:end])
        while span is not None and span.start < end:
            digest.update(request.images[span.image].key.encode())      # placeholders of all images are equal tokens
            span = next(spans, None)
        last = digest.digest()
        digests.append(last)
    return digests


class PrefixAffinity:
    """Keeps, for each worker process, the newest blocks of its prompts, as many as its KV cache holds."""

    def __init__(self) -> None:
        # A process has a channel of its own, so a restarted worker begins with nothing.
        self._given: WeakKeyDictionary[object, OrderedDict[bytes, None]] = WeakKeyDictionary()

    def known(self, worker: Worker, digests: Sequence[bytes]) -> int:
        """Tokens of the longest prefix that the worker was given before."""
        given = self._given.get(worker.channel) if worker.channel else None
        if given is None:
            return 0
        count = 0
        for digest in digests:
            if digest not in given:
                break
            count += 1
        return count * BLOCK

    def add(self, worker: Worker, digests: Sequence[bytes]) -> None:
        """The worker is given this prompt; its oldest blocks are forgotten, as its prefix cache evicts them."""
        if worker.channel is None or worker.ready is None or not worker.spec.prefix_cache:
            return
        given = self._given.setdefault(worker.channel, OrderedDict())
        for digest in reversed(digests):        # first blocks are kept longest: later ones are useless without them
            given[digest] = None
            given.move_to_end(digest)
        while len(given) > worker.ready.kv_tokens // BLOCK:
            given.popitem(last=False)
