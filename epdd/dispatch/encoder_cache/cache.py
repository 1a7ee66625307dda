"""The encoder cache: embeddings of images, in the host's arena and in encoders' GPU memory.

An `EncoderCacheEntry` is one image's embedding.  It is
- referenced (`ref_count`) by the requests that use or wait for it; at 0 it is evictable once it is written,
- pinned (`pins`) by the works in worker processes that may still read or write its bytes.
Invariant: bytes go back to the allocator only when both are zero.  If a worker could still touch them, one request's
picture could get into another's answer.

A request acquires all its entries in one step, or waits without any, first come first served: two requests never wait
for each other's bytes.

Each entry has a lease in the host's arena until its embedding is written, so requests wait for room there only.  An
encoder on a GPU may write into its own arena instead; then the host's bytes are freed.  Invariant: an arena's number is
never used again, so an old lease never names another embedding.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from epdd.dispatch.encoder_cache.arena_space import ArenaSpace
from epdd.dispatch.request import Image
from epdd.dispatch.request_record import EncodingRecord
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
    gpu_lease: Lease | None = None  # where an encoder on a GPU writes it; becomes `lease` once it is written
    ready: bool = False             # the embedding is written
    dropped: bool = False           # out of the cache; its bytes are freed with the last pin
    lost: bool = False              # its GPU memory is gone or cannot be read
    failure: EpddError | None = None
    record: EncodingRecord = field(default_factory=EncodingRecord)
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.image.key

    async def wait(self) -> None:
        """Return once the embedding is written; raises the error of its encoding."""
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
    hits: int = 0                   # the embedding was in the cache
    misses: int = 0                 # the image had to be encoded
    joined: int = 0                 # another request was already encoding the image
    evictions: int = 0


# Entries of all images, in their order; those of them that the caller has to get encoded.
Acquired = tuple[list[EncoderCacheEntry], list[EncoderCacheEntry]]


class EncoderCache:
    """Owns all entries and the bytes of all arenas.  All calls come from the event loop."""

    def __init__(self, arena_bytes: int, cache_bytes: int) -> None:
        """`cache_bytes` limits the evictable entries in the host's arena; it is cut to the arena's size."""
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
        """Reference every image's entry; waits in turn until all fit.

        The caller releases each entry of the first list once.  Raises ArenaFull if they could never fit together.
        """
        if self.needed(images, sizes) > self.size:
            raise ArenaFull("the embeddings of the request's images are larger than the arena (arena.bytes)")
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
        """Bytes were freed: wake the first request that waits for room."""
        if self._waiting:
            self._waiting[0].set()

    def _try(self, images: Sequence[Image], sizes: Sequence[int]) -> Acquired | None:
        got = self._fit(images, sizes)
        if got is None and self.host.only_cached:
            # No more bytes will be freed by others: the request's own cached entries, or gaps between entries, are in
            # the way.  An emptied arena has room for every request that may wait.
            for entry in list(self.host.evictable.values()):
                self._evict(entry)
            got = self._fit(images, sizes)
        return got

    def _fit(self, images: Sequence[Image], sizes: Sequence[int]) -> Acquired | None:
        fresh: dict[str, EncoderCacheEntry] = {}
        # Reference cached entries first, so that making room does not evict them.
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
        """A request ends its use.  A written embedding becomes evictable; any other entry without pins is dropped."""
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
        """A work that reads or writes the bytes begins."""
        entry.pins += 1

    def unpin(self, entry: EncoderCacheEntry) -> None:
        """That work has ended, by its last message or with its process."""
        entry.pins -= 1
        assert entry.pins >= 0, "unpinned more often than pinned"
        if entry.pins == 0 and entry.dropped:
            self._free(entry.lease)
        elif entry.pins == 0 and entry.ref_count == 0 and not entry.ready:
            self._drop(entry)
        self._freed()

    def begin_encoding(self, entry: EncoderCacheEntry, arena: int, size: int) -> Lease:
        """Pin the entry for an encoder.  Returns where it writes: `size` bytes in `arena`, or else the host's lease."""
        self.pin(entry)
        if arena != HOST:
            entry.gpu_lease = self._allocate(arena, size)
        return entry.gpu_lease or entry.lease

    def end_encoding(self, entry: EncoderCacheEntry, target: Lease) -> None:
        """Unpin the entry: the encoder will not write to `target` any more.  A written embedding stays.

        Another encoder may be writing the entry elsewhere already.
        """
        if entry.gpu_lease == target:
            entry.gpu_lease = None
        if target.arena != HOST and (entry.lease.arena, entry.lease.offset) != (target.arena, target.offset):
            self._free(target)
        self.unpin(entry)

    def written(self, entry: EncoderCacheEntry, size: int, dtype: str) -> None:
        """The encoder has written `size` bytes; the rest of the lease is freed."""
        lease = entry.gpu_lease or entry.lease
        assert size <= lease.size, "an encoder wrote beyond its lease"
        if entry.gpu_lease is not None:
            self._free(entry.lease)
            entry.gpu_lease = None
        self.arenas[lease.arena].extents.shrink(lease.offset, lease.size, size)
        entry.lease = Lease(lease.offset, size, lease.arena)
        entry.dtype, entry.ready = dtype, True
        # Image files of all entries would be most of the daemon's memory.
        entry.image = replace(entry.image, data=b"")
        if entry.ref_count == 0:
            self.arenas[lease.arena].add(entry)
            self._trim()
        entry._wake()
        self._freed()

    def failed(self, entry: EncoderCacheEntry, error: EpddError) -> None:
        """The image cannot be encoded: `wait` raises `error`, and the next request encodes it anew."""
        entry.failure = error
        entry.record.fail(error)
        self._drop(entry)
        entry._wake()
        self._freed()

    # --- arenas in GPU memory

    def add_arena(self, arena: int, size: int) -> None:
        self.arenas[arena] = ArenaSpace(size)

    def lose_arena(self, arena: int) -> None:
        """The encoder's process is gone, with all embeddings in its arena."""
        for entry in list(self._entries.values()):
            if entry.lease.arena == arena:
                self.lose(entry)
            elif entry.gpu_lease is not None and entry.gpu_lease.arena == arena:
                entry.gpu_lease = None      # not written yet: the lease in the host's arena is still valid
        del self.arenas[arena]

    def lose(self, entry: EncoderCacheEntry) -> None:
        """Drop an entry whose bytes cannot be read: requests that use it are retried."""
        entry.lost = True
        self._drop(entry)

    # --- bytes

    def _allocate(self, arena: int, size: int) -> Lease | None:
        """A lease of fresh bytes, for which least recently used entries are evicted; None if there is no room."""
        space = self.arenas[arena]
        while (offset := space.extents.take(size)) is None:
            if (victim := space.victim()) is None:
                return None
            self._evict(victim)
        return Lease(offset, size, arena)

    def _free(self, lease: Lease) -> None:
        """Give bytes back to their arena.  Invariant: no worker can touch them any more."""
        if lease.arena in self.arenas:
            self.arenas[lease.arena].extents.release(lease.offset, lease.size)

    def _trim(self) -> None:
        while self.host.cached_bytes > self.cache_limit:
            self._evict(next(iter(self.host.evictable.values())))

    def _evict(self, entry: EncoderCacheEntry) -> None:
        self._drop(entry)
        self.counts.evictions += 1

    def _drop(self, entry: EncoderCacheEntry) -> None:
        """Take the entry out of the cache; its bytes are freed now, or with the last pin."""
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
