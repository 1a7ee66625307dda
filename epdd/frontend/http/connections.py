"""Which HTTP connections may stay: how long each may wait, and how many there may be.

A client with nothing to say costs a descriptor and some kilobytes.  So a request's head has a deadline, a connection
without a request a time to live, and under the limit of connections whoever asks for nothing gives way to who comes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from epdd.frontend.http import descriptors
from epdd.settings.service import ServerSettings

log = logging.getLogger(__name__)

STALLED_S = 10.0            # an answer that its client has not read on for so long may give way
GRACE_S = 1.0               # in which a client that came, or was answered, is taken to be about to ask
_SOON_S = 0.25              # in which nearly all requests follow their connection
_LOOKED_AT = 32             # of the oldest connections of a table, for one that may give way
_LOG_S = 60.0               # between two lines about the limit


class HttpConnection(Protocol):
    """What is asked of a connection."""

    def expire(self, reason: str) -> None:
        """Its time is over: answer what is half said, and close."""

    def drop(self) -> None:
        """Close it at once: the descriptor is needed."""

    def has_unread(self) -> bool:
        """Its client has sent bytes that the event loop has not come to."""


class Connections:
    """All connections of the API, by what they wait for; each is in one of the tables, or busy."""

    def __init__(self, settings: ServerSettings) -> None:
        self._max = settings.max_connections
        # Of each table the seconds that one may stay there (0: any), and since when each is there: oldest first.
        self._tables: dict[str, tuple[float, dict[HttpConnection, float]]] = {
            "head": (settings.head_timeout_s, {}),      # owe a request's head
            "idle": (settings.keep_alive_s, {}),        # were answered, and may ask again
            "stalled": (settings.timeout_s, {}),        # do not read their answer
        }
        self._open: set[HttpConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.closed: Counter[str] = Counter()           # by us, by reason
        self.exhausted = 0                              # times that no descriptor was free
        self.give_way: Callable[[], bool] = lambda: False   # ends the slowest body, if there is a slow one
        self._logged = -_LOG_S

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: HttpConnection) -> bool:
        """A connection came; False if there is no room, and nobody who could give way."""
        self._open.add(connection)
        if self.fit():
            self.waits(connection, "head")
            return True
        self._open.discard(connection)
        self._count("refused")
        return False

    def fit(self) -> bool:
        """Close connections until they are within the limit; False if too many of them are busy."""
        while len(self._open) > min(self._max or len(self._open), descriptors.for_connections()):
            victim = self._least_needed()
            if victim is None:
                # Its descriptor comes back a moment later: the reserve carries one more meanwhile.
                return self.give_way()
            self.ended(victim)
            victim.drop()
            self._count("limit")
        return True

    def waits(self, connection: HttpConnection, what: str) -> None:
        """From now on it waits: "head", "idle" or "stalled"."""
        self.busy(connection)
        if connection not in self._open:
            return
        limit_s, table = self._tables[what]
        table[connection] = asyncio.get_running_loop().time()
        if limit_s:
            self._wake_by(table[connection] + limit_s)

    def busy(self, connection: HttpConnection) -> None:
        """It does not wait any longer."""
        for _, table in self._tables.values():
            table.pop(connection, None)

    def ended(self, connection: HttpConnection) -> None:
        """It is closed, or about to be."""
        self.busy(connection)
        self._open.discard(connection)

    def look(self) -> None:
        """Called every few seconds: where descriptors have run out in spite of the reserve, accept says nothing."""
        if why := descriptors.exhausted():
            self.exhausted += 1
            self._warn(f"no descriptor is free ({why}): new clients are not let in")
            self.fit()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _least_needed(self) -> HttpConnection | None:
        """The connection that has owed a head the longest, then the one that was answered the longest ago, then one
        whose client does not read.

        A client that was answered just now may send its next request before it sees that its connection is closed, and
        would lose it: it stays before one that has sent nothing for a quarter of a second.  On a busy machine a request
        can also wait in the kernel, unread.
        """
        now = asyncio.get_running_loop().time()
        for what, least_s in (("head", GRACE_S), ("idle", GRACE_S), ("head", _SOON_S), ("idle", 0.0),
                              ("head", 0.0), ("stalled", STALLED_S)):
            for connection, since in itertools.islice(self._tables[what][1].items(), _LOOKED_AT):
                if now - since < least_s:
                    break
                if what == "stalled" or not connection.has_unread():
                    return connection
        return None

    def _wake_by(self, when: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._sweep)

    def _sweep(self) -> None:
        """End all whose time is over."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        for what, (limit_s, table) in self._tables.items():
            while limit_s and table:
                connection, since = next(iter(table.items()))
                if since + limit_s > now:
                    self._wake_by(since + limit_s)
                    break
                self.ended(connection)
                self.closed[what] += 1
                connection.expire(what)

    def _count(self, reason: str) -> None:
        self.closed[reason] += 1
        self._warn("connections are at their limit (server.max_connections, or that of descriptors: ulimit -n, "
                   "LimitNOFILE)")

    def _warn(self, what: str) -> None:
        """Log it, once in a minute."""
        now = time.monotonic()
        if now - self._logged >= _LOG_S:
            self._logged = now
            log.warning("%s open=%s closed_for_others=%s refused=%s", what, len(self._open), self.closed["limit"],
                        self.closed["refused"])
