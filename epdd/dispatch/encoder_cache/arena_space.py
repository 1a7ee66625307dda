"""The bytes of one arena: which are free, and which hold evictable entries.

The host has one arena.  Each encoder on a GPU can add one in its GPU's memory, which lasts as long as its process.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from epdd.arena import PAGE
from epdd.dispatch.encoder_cache.extents import Extents

if TYPE_CHECKING:
    from epdd.dispatch.encoder_cache.cache import EncoderCacheEntry


class ArenaSpace:
    """Allocator of one arena, and its evictable entries in the order of their last use."""

    def __init__(self, size: int) -> None:
        self.extents = Extents(size, PAGE)
        self.evictable: OrderedDict[str, EncoderCacheEntry] = OrderedDict()     # least recently used first
        self.cached_bytes = 0       # of evictable entries; adding them up at each release would take milliseconds

    @property
    def used_bytes(self) -> int:
        return self.extents.size - self.extents.free

    @property
    def only_cached(self) -> bool:
        """Every byte that is not free belongs to an evictable entry without pins."""
        return self.used_bytes == self.cached_bytes and not any(entry.pins for entry in self.evictable.values())

    def victim(self) -> EncoderCacheEntry | None:
        """The least recently used evictable entry without pins: dropping it frees its bytes at once."""
        return next((entry for entry in self.evictable.values() if entry.pins == 0), None)

    def add(self, entry: EncoderCacheEntry) -> None:
        """Make an entry evictable."""
        self.evictable[entry.key] = entry
        self.cached_bytes += self.extents.rounded(entry.lease.size)

    def remove(self, entry: EncoderCacheEntry) -> None:
        """Make an entry not evictable: it is needed again, or dropped."""
        if self.evictable.pop(entry.key, None) is not None:
            self.cached_bytes -= self.extents.rounded(entry.lease.size)
