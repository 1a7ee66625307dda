"""Which beginnings of prompts each prefill-decode worker was given: there its prefix cache may still have them.

A guess that only decides who is asked.  What really need not be computed again the worker knows itself, by comparing
tokens (`worker/language/prefix_cache.py`), and answers report that.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from weakref import WeakKeyDictionary

from epdd.dispatch.request import Request
from epdd.fleet.worker import Worker

BLOCK = 64          # tokens; a beginning is known in whole blocks


def chain(request: Request) -> list[bytes]:
    """A digest for each whole block of the prompt, of the salt and all tokens and images from the first to its end."""
    digests: list[bytes] = []
    tokens, spans, last = array("i", request.tokens), iter(request.spans), request.salt.encode()
    span = next(spans, None)
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        digest = blake2b(last, digest_size=16)
        digest.update(tokens[end - BLOCK:end])
        while span is not None and span.start < end:
            digest.update(request.images[span.image].key.encode())      # its placeholders are like any other's
            span = next(spans, None)
        last = digest.digest()
        digests.append(last)
    return digests


class PrefixAffinity:
    """By worker process, the blocks of the prompts it was given, as many as its KV cache holds."""

    def __init__(self) -> None:
        # By channel: a process's own, so that one that comes back begins with nothing.
        self._given: WeakKeyDictionary[object, OrderedDict[bytes, None]] = WeakKeyDictionary()

    def known(self, worker: Worker, digests: Sequence[bytes]) -> int:
        """Tokens of the longest beginning that it was given before."""
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
        """It is given this prompt; what it was given longest ago it has most likely dropped."""
        if worker.channel is None or worker.ready is None or not worker.spec.prefix_cache:
            return
        given = self._given.setdefault(worker.channel, OrderedDict())
        for digest in reversed(digests):        # the beginnings last: they are of use without what follows them
            given[digest] = None
            given.move_to_end(digest)
        while len(given) > worker.ready.kv_tokens // BLOCK:
            given.popitem(last=False)
