"""Who holds which bytes of the arena; the embedding cache is leases that stay.

An `Embedding` is one image's place in the arena.  It is
- wanted (`refs`) by the requests that use or wait for it,
- held (`holds`) by the works in worker processes that may still read or write its bytes.
Invariant: bytes go back to the allocator only when both are zero.  Giving them away while a worker can
still touch them would put one request's picture into another's answer.

A request takes all its embeddings in one step or waits, first come first served, holding nothing: so two
requests can never wait for each other's bytes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from epdd.arena import PAGE
from epdd.dispatch.encoder_cache.extents import Extents
from epdd.dispatch.encoder_cache.gpu_pools import GpuPools
from epdd.dispatch.request import Image
from epdd.errors import ArenaFull, EpddError
from epdd.wire import Lease


@dataclass(eq=False)
class EncoderCacheEntry:
    """One image's rows in the arena, encoded or about to be."""

    image: Image
    lease: Lease
    dtype: str = ""
    refs: int = 0
    holds: int = 0
    place: Lease | None = None      # where an encoder on a GPU writes it; then its lease until that is done
    ready: bool = False
    dropped: bool = False           # out of the cache for good; bytes go back with the last hold
    lost: bool = False              # with the GPU memory that it lay in
    failure: EpddError | None = None
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.image.key

    async def wait(self) -> None:
        """Until the rows are written.  Raises what made the encoding fail."""
        if not self.ready and self.failure is None:
            future = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            await future
        if self.failure is not None:
            raise self.failure

    def _wake(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)
        self._waiters.clear()


@dataclass
class CacheCounts:
    hits: int = 0                   # rows were there
    misses: int = 0                 # had to be encoded
    joined: int = 0                 # somebody else's encoding was already under way
    evictions: int = 0


# Entries of all images, in their order, and those among them that are to be encoded.
Acquired = tuple[list[EncoderCacheEntry], list[EncoderCacheEntry]]


class Leases:
    """The arena's allocator and the cache on top of it.  All calls come from the event loop."""

    def __init__(self, arena_bytes: int, cache_bytes: int) -> None:
        """`cache_bytes` bounds what stays for reuse; it is never more than the arena."""
        self._extents = Extents(arena_bytes, PAGE)
        self.cache_limit = min(cache_bytes, self._extents.size)
        self._entries: dict[str, EncoderCacheEntry] = {}
        self._idle: OrderedDict[str, EncoderCacheEntry] = OrderedDict()     # ready and unwanted, oldest first
        self.cached_bytes = 0               # of those; summing them up for each release would be milliseconds
        self._waiting: deque[asyncio.Event] = deque()
        self.gpu = GpuPools(self._drop, self._evict)
        self.counts = CacheCounts()

    @property
    def size(self) -> int:
        return self._extents.size

    def needed(self, images: Sequence[Image], sizes: Sequence[int]) -> int:
        """Arena bytes of a request's distinct images."""
        return sum({image.key: self._extents.rounded(size) for image, size in zip(images, sizes)}.values())

    async def acquire(self, images: Sequence[Image], sizes: Sequence[int]) -> Acquired:
        """Want every image's embedding: (one per image, those of them that must be encoded now).

        Waits in turn until all fit.  The caller releases each entry of the first list once.
        Raises ArenaFull if they could never fit.
        """
        if self.needed(images, sizes) > self.size:
            raise ArenaFull("the request's images do not fit the arena together")
        if self._waiting or (got := self._try(images, sizes)) is None:
            got = await self._wait(images, sizes)
        return got

    async def _wait(self, images: Sequence[Image], sizes: Sequence[int]) -> Acquired:
        turn = asyncio.Event()
        self._waiting.append(turn)
        try:
            while True:
                if self._waiting[0] is turn and (got := self._try(images, sizes)) is not None:
                    return got
                turn.clear()
                await turn.wait()
        finally:
            self._waiting.remove(turn)
            self._freed()

    def _freed(self) -> None:
        """Something came back: let the first in the queue look again."""
        if self._waiting:
            self._waiting[0].set()

    def _try(self, images: Sequence[Image], sizes: Sequence[int]) -> Acquired | None:
        got = self._fit(images, sizes)
        if got is None and self._only_cached:
            # Nobody will give anything back.  In the way are cached embeddings, the request's own among them, and the
            # holes between: an empty arena has room for whatever may wait.
            for embedding in list(self._idle.values()):
                self._evict(embedding)
            got = self._fit(images, sizes)
        return got

    @property
    def _only_cached(self) -> bool:
        """Every byte that is not free is kept for reuse, and touched by nobody."""
        return self.used_bytes == self.cached_bytes and not any(entry.holds for entry in self._idle.values())

    def _fit(self, images: Sequence[Image], sizes: Sequence[int]) -> Acquired | None:
        fresh: dict[str, EncoderCacheEntry] = {}
        wanted: list[EncoderCacheEntry] = []
        # Want the present ones first, so that making room cannot evict them.
        for image in images:
            if image.key in self._entries:
                self._want(self._entries[image.key])
                wanted.append(self._entries[image.key])
        for image, size in zip(images, sizes):
            if image.key in self._entries or image.key in fresh:
                continue
            offset = self._allocate(size)
            if offset is None:
                for embedding in fresh.values():
                    self._extents.release(embedding.lease.offset, embedding.lease.size)
                for embedding in wanted:
                    self._unwant(embedding)
                return None
            fresh[image.key] = EncoderCacheEntry(image, Lease(offset, size))
        self._count(wanted, fresh)
        self._entries.update(fresh)
        result = [self._entries[image.key] for image in images]
        for embedding in result:
            if embedding.key in fresh:
                embedding.refs += 1
        return result, list(fresh.values())

    def _count(self, present: Sequence[EncoderCacheEntry], fresh: dict[str, EncoderCacheEntry]) -> None:
        self.counts.hits += sum(embedding.ready for embedding in present)
        self.counts.joined += sum(not embedding.ready for embedding in present)
        self.counts.misses += len(fresh)

    def _allocate(self, size: int) -> int | None:
        """A fresh extent, evicting the longest unused embeddings for it as needed."""
        while (offset := self._extents.take(size)) is None:
            victim = next((e for e in self._idle.values() if e.holds == 0), None)
            if victim is None:
                return None
            self._evict(victim)
        return offset

    def _evict(self, embedding: EncoderCacheEntry) -> None:
        self._drop(embedding)
        self.counts.evictions += 1

    def _want(self, embedding: EncoderCacheEntry) -> None:
        embedding.refs += 1
        self._unrest(embedding)

    def _unwant(self, embedding: EncoderCacheEntry) -> None:
        embedding.refs -= 1
        assert embedding.refs >= 0, "released more often than acquired"
        if embedding.refs == 0 and embedding.ready and not embedding.dropped:
            self._rest(embedding)

    def _rest(self, embedding: EncoderCacheEntry) -> None:
        if embedding.lease.arena:
            self.gpu.rest(embedding)
            return
        self._idle[embedding.key] = embedding
        self.cached_bytes += self._extents.rounded(embedding.lease.size)

    def _unrest(self, embedding: EncoderCacheEntry) -> None:
        if embedding.lease.arena:
            self.gpu.unrest(embedding)
        elif self._idle.pop(embedding.key, None) is not None:
            self.cached_bytes -= self._extents.rounded(embedding.lease.size)

    def release(self, embedding: EncoderCacheEntry) -> None:
        """The request needs it no more.  A ready one stays as cache; one that failed or was never begun goes."""
        self._unwant(embedding)
        if embedding.refs == 0 and not embedding.ready and embedding.holds == 0:
            self._drop(embedding)
        self._trim()
        self._freed()

    def _trim(self) -> None:
        while self._idle and self.cached_bytes > self.cache_limit:
            self._evict(next(iter(self._idle.values())))

    def hold(self, embedding: EncoderCacheEntry) -> None:
        """A work that touches the bytes begins."""
        embedding.holds += 1

    def unhold(self, embedding: EncoderCacheEntry) -> None:
        """That work has ended: by its last message or with its process."""
        embedding.holds -= 1
        assert embedding.holds >= 0, "unheld more often than held"
        if embedding.holds == 0 and embedding.dropped:
            self._give_back(embedding)
        elif embedding.holds == 0 and embedding.refs == 0 and not embedding.ready:
            self._drop(embedding)
        self._freed()

    def written(self, embedding: EncoderCacheEntry, size: int, dtype: str) -> None:
        """The encoder has written `size` bytes; what is left of the lease goes back."""
        assert size <= (embedding.place or embedding.lease).size, "an encoder wrote beyond its lease"
        if embedding.place is not None:
            self._extents.release(embedding.lease.offset, embedding.lease.size)
            embedding.lease = self.gpu.written(embedding, size)
        else:
            self._extents.shrink(embedding.lease.offset, embedding.lease.size, size)
            embedding.lease = Lease(embedding.lease.offset, size)
        embedding.dtype, embedding.ready = dtype, True
        # The file was needed to encode it; kept with the cache it would be most of the daemon's memory.
        embedding.image = replace(embedding.image, data=b"")
        if embedding.refs == 0:
            self._rest(embedding)
            self._trim()
        embedding._wake()
        self._freed()

    def failed(self, embedding: EncoderCacheEntry, error: EpddError) -> None:
        """It cannot be encoded: all who wait get `error`, and the next to ask tries afresh."""
        embedding.failure = error
        self._drop(embedding)
        embedding._wake()
        self._freed()

    def _drop(self, embedding: EncoderCacheEntry) -> None:
        """Forget it; the bytes go back now or with the last hold."""
        if embedding.dropped:
            return
        embedding.dropped = True
        self._unrest(embedding)
        if self._entries.get(embedding.key) is embedding:
            del self._entries[embedding.key]
        if embedding.holds == 0:
            self._give_back(embedding)

    def _give_back(self, embedding: EncoderCacheEntry) -> None:
        if embedding.lease.arena:
            self.gpu.give_back(embedding, embedding.lease)
        else:
            self._extents.release(embedding.lease.offset, embedding.lease.size)

    @property
    def used_bytes(self) -> int:
        return self._extents.size - self._extents.free

    @property
    def entries(self) -> int:
        return len(self._entries)

    @property
    def idle_entries(self) -> int:
        return len(self._idle) + sum(len(pool.idle) for pool in self.gpu.pools.values())

    @property
    def waiting(self) -> int:
        return len(self._waiting)
