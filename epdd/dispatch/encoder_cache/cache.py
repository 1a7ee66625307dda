"""The encoder cache: embeddings of images, in the host's arena and in encoders' GPU memory.

An `EncoderCacheEntry` is one image's embedding.  It is
- needed (`ref_count`) by the requests that use or wait for it; at 0 it is evictable once it is written,
- pinned (`pins`) by the works in worker processes that may still read or write its bytes.
Invariant: bytes go back to the allocator only when both are zero.  Giving them away while a worker can
still touch them would put one request's picture into another's answer.

A request acquires all its entries in one step or waits, first come first served, with none: so two requests can
never wait for each other's bytes.

Each entry has a lease in the host's arena until its embedding is written, so requests wait for room there alone.  An
encoder on a GPU may write into its own arena instead; then the host's bytes go back.  Invariant: an arena's number is
never used again, so that what still names it means nothing and nobody else's embedding.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from epdd.dispatch.encoder_cache.arena_space import ArenaSpace
from epdd.dispatch.request import Image
from epdd.errors import ArenaFull, EpddError
from epdd.wire import Lease

HOST = 0        # the host's arena


@dataclass(eq=False)
class EncoderCacheEntry:
    """One image's embedding, encoded or about to be."""

    image: Image
    lease: Lease
    dtype: str = ""
    ref_count: int = 0
    pins: int = 0
    gpu_lease: Lease | None = None  # where an encoder on a GPU writes it; then its lease
    ready: bool = False
    dropped: bool = False           # out of the cache for good; bytes go back with the last pin
    lost: bool = False              # with the GPU memory that it lay in
    failure: EpddError | None = None
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.image.key

    async def wait(self) -> None:
        """Until the embedding is written.  Raises what made the encoding fail."""
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
    hits: int = 0                   # the embedding was there
    misses: int = 0                 # had to be encoded
    joined: int = 0                 # another request's encoding was already under way
    evictions: int = 0


# Entries of all images, in their order, and those among them that are to be encoded.
Acquired = tuple[list[EncoderCacheEntry], list[EncoderCacheEntry]]


class EncoderCache:
    """All entries and all arenas' bytes.  All calls come from the event loop."""

    def __init__(self, arena_bytes: int, cache_bytes: int) -> None:
        """`cache_bytes` bounds what stays in the host's arena for reuse; it is never more than the arena."""
        self.host = ArenaSpace(arena_bytes)
        self.cache_limit = min(cache_bytes, self.host.extents.size)
        self.arenas: dict[int, ArenaSpace] = {HOST: self.host}
        self._entries: dict[str, EncoderCacheEntry] = {}
        self._waiting: deque[asyncio.Event] = deque()
        self.counts = CacheCounts()

    @property
    def size(self) -> int:
        """Bytes of the host's arena."""
        return self.host.extents.size

    def needed(self, images: Sequence[Image], sizes: Sequence[int]) -> int:
        """Arena bytes of a request's distinct images."""
        return sum({image.key: self.host.extents.rounded(size) for image, size in zip(images, sizes)}.values())

    # --- requests

    async def acquire(self, images: Sequence[Image], sizes: Sequence[int]) -> Acquired:
        """Every image's entry: (one per image, those of them that must be encoded now).

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
        if got is None and self.host.only_cached:
            # Nothing else will come back.  In the way are evictable entries, the request's own among them, and the
            # holes between: an empty arena has room for whatever may wait.
            for entry in list(self.host.evictable.values()):
                self._evict(entry)
            got = self._fit(images, sizes)
        return got

    def _fit(self, images: Sequence[Image], sizes: Sequence[int]) -> Acquired | None:
        fresh: dict[str, EncoderCacheEntry] = {}
        # The present ones first, so that making room cannot evict them.
        present = [self._entries[image.key] for image in images if image.key in self._entries]
        for entry in present:
            self._reference(entry)
        for image, size in zip(images, sizes):
            if image.key in self._entries or image.key in fresh:
                continue
            lease = self._allocate(HOST, size)
            if lease is None:
                for entry in fresh.values():
                    self._free(entry.lease)
                for entry in present:
                    self._dereference(entry)
                return None
            fresh[image.key] = EncoderCacheEntry(image, lease)
        self._count(present, fresh)
        self._entries.update(fresh)
        result = [self._entries[image.key] for image in images]
        for entry in result:
            if entry.key in fresh:
                entry.ref_count += 1
        return result, list(fresh.values())

    def _count(self, present: Sequence[EncoderCacheEntry], fresh: dict[str, EncoderCacheEntry]) -> None:
        self.counts.hits += sum(entry.ready for entry in present)
        self.counts.joined += sum(not entry.ready for entry in present)
        self.counts.misses += len(fresh)

    def release(self, entry: EncoderCacheEntry) -> None:
        """The request needs it no more.  A ready one stays for reuse; one that failed or was never begun goes."""
        self._dereference(entry)
        if entry.ref_count == 0 and not entry.ready and entry.pins == 0:
            self._drop(entry)
        self._trim()
        self._freed()

    def _reference(self, entry: EncoderCacheEntry) -> None:
        entry.ref_count += 1
        if entry.ready:
            self.arenas[entry.lease.arena].remove(entry)

    def _dereference(self, entry: EncoderCacheEntry) -> None:
        entry.ref_count -= 1
        assert entry.ref_count >= 0, "released more often than acquired"
        if entry.ref_count == 0 and entry.ready and not entry.dropped:
            self.arenas[entry.lease.arena].add(entry)

    # --- works in worker processes

    def pin(self, entry: EncoderCacheEntry) -> None:
        """A work that touches the bytes begins."""
        entry.pins += 1

    def unpin(self, entry: EncoderCacheEntry) -> None:
        """That work has ended: by its last message or with its process."""
        entry.pins -= 1
        assert entry.pins >= 0, "unpinned more often than pinned"
        if entry.pins == 0 and entry.dropped:
            self._free(entry.lease)
        elif entry.pins == 0 and entry.ref_count == 0 and not entry.ready:
            self._drop(entry)
        self._freed()

    def begin_encoding(self, entry: EncoderCacheEntry, arena: int, size: int) -> Lease:
        """An encoder begins, which pins the entry: where it writes, `size` bytes in `arena` or in the host's lease."""
        self.pin(entry)
        if arena != HOST:
            entry.gpu_lease = self._allocate(arena, size)
        return entry.gpu_lease or entry.lease

    def end_encoding(self, entry: EncoderCacheEntry, target: Lease) -> None:
        """The encoder will not write to `target` any more; an embedding that it has written stays.

        Another encoder may write elsewhere already.
        """
        if entry.gpu_lease == target:
            entry.gpu_lease = None
        if target.arena != HOST and (entry.lease.arena, entry.lease.offset) != (target.arena, target.offset):
            self._free(target)
        self.unpin(entry)

    def written(self, entry: EncoderCacheEntry, size: int, dtype: str) -> None:
        """The encoder has written `size` bytes; what is left of the lease goes back."""
        lease = entry.gpu_lease or entry.lease
        assert size <= lease.size, "an encoder wrote beyond its lease"
        if entry.gpu_lease is not None:
            self._free(entry.lease)
            entry.gpu_lease = None
        self.arenas[lease.arena].extents.shrink(lease.offset, lease.size, size)
        entry.lease = Lease(lease.offset, size, lease.arena)
        entry.dtype, entry.ready = dtype, True
        # The file was needed to encode it; kept with the cache it would be most of the daemon's memory.
        entry.image = replace(entry.image, data=b"")
        if entry.ref_count == 0:
            self.arenas[lease.arena].add(entry)
            self._trim()
        entry._wake()
        self._freed()

    def failed(self, entry: EncoderCacheEntry, error: EpddError) -> None:
        """It cannot be encoded: all who wait get `error`, and the next to ask tries afresh."""
        entry.failure = error
        self._drop(entry)
        entry._wake()
        self._freed()

    # --- arenas in GPU memory

    def add_arena(self, arena: int, size: int) -> None:
        self.arenas[arena] = ArenaSpace(size)

    def lose_arena(self, arena: int) -> None:
        """The encoder's process is gone, and so are all embeddings that lay there."""
        for entry in list(self._entries.values()):
            if entry.lease.arena == arena:
                self.lose(entry)
            elif entry.gpu_lease is not None and entry.gpu_lease.arena == arena:
                entry.gpu_lease = None      # it was being written: its lease in the host's arena is still there
        del self.arenas[arena]

    def lose(self, entry: EncoderCacheEntry) -> None:
        """Its bytes are of no use: a request that needs it begins anew."""
        entry.lost = True
        self._drop(entry)

    # --- bytes

    def _allocate(self, arena: int, size: int) -> Lease | None:
        """Fresh bytes; the least recently used evictable entries there go for them as needed."""
        space = self.arenas[arena]
        while (offset := space.extents.take(size)) is None:
            if (victim := space.victim()) is None:
                return None
            self._evict(victim)
        return Lease(offset, size, arena)

    def _free(self, lease: Lease) -> None:
        """No worker touches these bytes any more."""
        if lease.arena in self.arenas:
            self.arenas[lease.arena].extents.release(lease.offset, lease.size)

    def _trim(self) -> None:
        while self.host.cached_bytes > self.cache_limit:
            self._evict(next(iter(self.host.evictable.values())))

    def _evict(self, entry: EncoderCacheEntry) -> None:
        self._drop(entry)
        self.counts.evictions += 1

    def _drop(self, entry: EncoderCacheEntry) -> None:
        """Forget it; the bytes go back now or with the last pin."""
        if entry.dropped:
            return
        entry.dropped = True
        if entry.ready and entry.ref_count == 0:
            self.arenas[entry.lease.arena].remove(entry)
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        if entry.pins == 0:
            self._free(entry.lease)

    # --- figures

    @property
    def entries(self) -> int:
        return len(self._entries)

    @property
    def evictable_entries(self) -> int:
        return sum(len(space.evictable) for space in self.arenas.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)
