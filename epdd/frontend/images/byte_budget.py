"""A byte budget that requests share, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from epdd.errors import Overloaded


class Share:
    """The bytes one request holds of a budget."""

    def __init__(self, budget: Budget, amount: int) -> None:
        self._budget = budget
        self.amount = amount

    def offer(self, evict: Callable[[], None]) -> None:
        """The bytes are no longer needed, but useful: `evict` is called once another request needs their room."""
        if self.amount:
            self._budget.offer(self, evict)

    def keep(self) -> None:
        """Undo `offer`."""
        self._budget.keep(self)

    def grow(self, amount: int) -> None:
        """Take `amount` more.  Raises Overloaded: to wait here while holding bytes could deadlock."""
        if not self._budget.take_now(amount):
            raise Overloaded("Too many images are being read; try again later")
        self.amount += amount

    def shrink(self, amount: int) -> None:
        """Keep `amount` and free the rest."""
        if amount < self.amount:
            over, self.amount = self.amount - amount, amount
            self._budget.give(self, over)


class Budget:
    """Bytes that may be held at once.  A request waits once, for all that it is known to need, and holds none then."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._offers: dict[Share, Callable[[], None]] = {}      # empty while a request waits

    @property
    def used(self) -> int:
        return self._total - self._free

    @asynccontextmanager
    async def hold(self, amount: int) -> AsyncIterator[Share]:
        """Waits in turn.  An amount over the whole budget counts as the whole: the request then runs alone."""
        amount = min(amount, self._total)
        await self._take(amount)
        share = Share(self, amount)
        try:
            yield share
        finally:
            share.shrink(0)

    async def _take(self, amount: int) -> None:
        if not amount or not self._waiting and self._has(amount):
            self._free -= amount
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):      # passed over already
                    self._waiting.remove((amount, turn))
                self._grant()                   # the next may be small enough
            else:
                self._give(amount)              # granted in the same moment
            raise

    def take_now(self, amount: int) -> bool:
        """Take it if it is free, also before waiting requests."""
        if not self._has(amount):
            return False
        self._free -= amount
        return True

    def offer(self, share: Share, evict: Callable[[], None]) -> None:
        """As `Share.offer`."""
        if self._waiting:
            evict()
        else:
            self._offers.setdefault(share, evict)

    def keep(self, share: Share) -> None:
        """As `Share.keep`."""
        self._offers.pop(share, None)

    def _has(self, amount: int) -> bool:
        """Whether so much is free, after evicting offered shares, the oldest offer first."""
        while amount > self._free and self._offers:
            share = next(iter(self._offers))
            self._offers.pop(share)()
        return amount <= self._free

    def give(self, share: Share, amount: int) -> None:
        """Free bytes of a share."""
        if not share.amount:
            self.keep(share)
        self._give(amount)

    def _give(self, amount: int) -> None:
        self._free += amount
        self._grant()

    def _grant(self) -> None:
        # Strictly in order: small requests do not keep a large one waiting for ever.
        while self._waiting and self._waiting[0][0] <= self._free:
            amount, turn = self._waiting.popleft()
            if not turn.cancelled():    # cancelled: its task has not run since
                self._free -= amount
                turn.set_result(None)
