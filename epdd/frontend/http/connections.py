"""Limits of HTTP connections: how long each may wait, and how many are open.

A silent client costs a descriptor and a few kilobytes.  So a request's head has a deadline and a connection without a
request a time to live.  At the limit of connections one without a request is closed for a new one.
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

STALLED_S = 10.0            # a connection whose client has not read for this time may be closed for others
GRACE_S = 1.0               # a client is expected to send a request this soon after its connection, or an answer
_SOON_S = 0.25              # in which nearly all requests follow their connection
_LOOKED_AT = 32             # oldest connections of a table among which one to close is sought
_LOG_S = 60.0               # between two log lines about the limit


class HttpConnection(Protocol):
    """The calls that Connections makes on a connection."""

    def expire(self, reason: str) -> None:
        """Its time is over: answer half a request with an error, and close."""

    def drop(self) -> None:
        """Close it at once: the descriptor is needed."""

    def has_unread(self) -> bool:
        """Whether its client has sent bytes that the event loop has not read."""


class Connections:
    """All connections of the API; each is busy, or in the table of what it waits for."""

    def __init__(self, settings: ServerSettings) -> None:
        self._max = settings.max_connections
        # Each table: the seconds that one may stay (0: no limit), and since when each is in it, oldest first.
        self._tables: dict[str, tuple[float, dict[HttpConnection, float]]] = {
            "head": (settings.head_timeout_s, {}),      # the head of a request is missing
            "idle": (settings.keep_alive_s, {}),        # answered, without a new request
            "stalled": (settings.timeout_s, {}),        # the client does not read its answer
        }
        self._open: set[HttpConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.closed: Counter[str] = Counter()           # by the server, for each reason
        self.exhausted = 0                              # times that no descriptor was free
        self.evict_body: Callable[[], bool] = lambda: False   # evicts the slowest body, if one is slow
        self._logged = -_LOG_S

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: HttpConnection) -> bool:
        """Count a new connection; False if there is no room and no other can be closed for it."""
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
                # Its descriptor is freed a moment later: the reserve covers one more meanwhile.
                return self.evict_body()
            self.ended(victim)
            victim.drop()
            self._count("limit")
        return True

    def waits(self, connection: HttpConnection, what: str) -> None:
        """Put it into the table `what`: "head", "idle" or "stalled"."""
        self.busy(connection)
        if connection not in self._open:
            return
        limit_s, table = self._tables[what]
        table[connection] = asyncio.get_running_loop().time()
        if limit_s:
            self._wake_by(table[connection] + limit_s)

    def busy(self, connection: HttpConnection) -> None:
        """Take it out of the tables."""
        for _, table in self._tables.values():
            table.pop(connection, None)

    def ended(self, connection: HttpConnection) -> None:
        """It is closed, or about to be."""
        self.busy(connection)
        self._open.discard(connection)

    def look(self) -> None:
        """Called every few seconds: if descriptors run out in spite of the reserve, accept fails silently."""
        if why := descriptors.exhausted():
            self.exhausted += 1
            self._warn(f"no descriptor is free ({why}): new connections are not accepted")
            self.fit()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _least_needed(self) -> HttpConnection | None:
        """The connection that has lacked a head the longest, then the one that was answered the longest ago, then one
        whose client does not read.

        A client that was just answered may send its next request before it sees that its connection is closed, and
        would lose it: so a new connection that has sent nothing for _SOON_S is closed before it.  On a busy machine a
        request can also wait in the kernel, unread.
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
        """Log it, at most once in _LOG_S."""
        now = time.monotonic()
        if now - self._logged >= _LOG_S:
            self._logged = now
            log.warning("%s open=%s closed_for_others=%s refused=%s", what, len(self._open), self.closed["limit"],
                        self.closed["refused"])
