"""Slots that requests share round robin, so that one that needs many does not delay those that need few."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Waiting requests take free slots in turn, one each."""

    def __init__(self, slots: int) -> None:
        self._free = slots      # 0 while a request waits
        self._waiting: dict[object, deque[asyncio.Future[None]]] = {}       # by request, the next one first

    @asynccontextmanager
    async def take(self, request: object) -> AsyncIterator[None]:
        """Holds a slot for `request` until the block ends."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(request)
        try:
            yield
        finally:
            self._give()

    async def _wait(self, request: object) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():        # granted in the same moment
                self._give()
            raise

    def _give(self) -> None:
        while self._waiting:
            request = next(iter(self._waiting))
            turns = self._waiting.pop(request)
            turn = turns.popleft()
            if turns:
                self._waiting[request] = turns      # behind the others
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1
