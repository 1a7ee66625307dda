"""Memory on encoders' GPUs that embeddings can lie in, beside the host's arena.

An image's lease is in the host's arena until its rows are written, so requests take room there and wait for it there,
as if there were no pools.  When the image is handed to an encoder on a GPU, room is sought in that one's pool, and the
host's bytes go back once the rows are written; where the pool is full, or somebody could not read it, they go by the
host.  A pool lives as long as its encoder's process.  Invariant: its number is never given to another one, so that what
still names it means nothing and nobody else's rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epdd.arena import PAGE
from epdd.dispatch.encoder_cache.extents import Extents
from epdd.wire import Lease

if TYPE_CHECKING:
    from epdd.dispatch.encoder_cache.leases import EncoderCacheEntry


@dataclass(eq=False)
class PoolBook:
    """One encoder process's memory."""

    extents: Extents
    members: set[EncoderCacheEntry] = field(default_factory=set)        # their rows lie here, or are being written
    idle: OrderedDict[str, EncoderCacheEntry] = field(default_factory=OrderedDict)      # wanted by nobody, oldest first

    @property
    def used_bytes(self) -> int:
        return self.extents.size - self.extents.free

    @property
    def cached_bytes(self) -> int:
        return sum(self.extents.rounded(embedding.lease.size) for embedding in self.idle.values())


class GpuPools:
    """Allocator of all pools; `drop` and `evict` make the cache forget an embedding, and give its bytes back here."""

    def __init__(self, drop: Callable[[EncoderCacheEntry], None], evict: Callable[[EncoderCacheEntry], None]) -> None:
        self._drop, self._evict = drop, evict
        self.pools: dict[int, PoolBook] = {}

    def add(self, arena: int, size: int) -> None:
        self.pools[arena] = PoolBook(Extents(size, PAGE))

    def lose(self, arena: int) -> None:
        """The encoder's process is gone: so is all that lay there, wanted or not."""
        for embedding in list(self.pools.pop(arena).members):
            if embedding.place is not None:
                embedding.place = None      # it was being written: its lease in the host's arena is still there
            else:
                self.forget(embedding)

    def forget(self, embedding: EncoderCacheEntry) -> None:
        """Its rows are of no use to anybody: who wants it begins anew."""
        embedding.lost = True
        self._drop(embedding)

    def place(self, embedding: EncoderCacheEntry, arena: int, size: int) -> Lease | None:
        """Room for an image's rows, which its encoder may write from now on; None if there is none.

        What is kept there for reuse goes first, the longest unused before.
        """
        pool = self.pools[arena]
        while (offset := pool.extents.take(size)) is None:
            victim = next((each for each in pool.idle.values() if each.holds == 0), None)
            if victim is None:
                return None
            self._evict(victim)
        pool.members.add(embedding)
        embedding.place = Lease(offset, size, arena)
        return embedding.place

    def leave(self, embedding: EncoderCacheEntry, place: Lease) -> None:
        """The encoder will not write there any more; rows that it has written stay.

        One that is lost may be told of late, when another encoder has another place already.
        """
        if embedding.place == place:
            embedding.place = None
            self.give_back(embedding, place)

    def written(self, embedding: EncoderCacheEntry, size: int) -> Lease:
        """The rows lie in the place; it is the embedding's lease from now on."""
        place, embedding.place = embedding.place, None
        assert place is not None
        self.pools[place.arena].extents.shrink(place.offset, place.size, size)
        return Lease(place.offset, size, place.arena)

    def give_back(self, embedding: EncoderCacheEntry, lease: Lease) -> None:
        """Nobody touches these bytes any more."""
        pool = self.pools.get(lease.arena)
        if pool is not None:
            pool.members.discard(embedding)
            pool.extents.release(lease.offset, lease.size)

    def rest(self, embedding: EncoderCacheEntry) -> None:
        """Nobody wants it now; it stays until its room is needed."""
        self.pools[embedding.lease.arena].idle[embedding.key] = embedding

    def unrest(self, embedding: EncoderCacheEntry) -> None:
        pool = self.pools.get(embedding.lease.arena)
        if pool is not None:
            pool.idle.pop(embedding.key, None)
