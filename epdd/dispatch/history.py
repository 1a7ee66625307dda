"""Records of the requests in flight and of the last that ended, for `epdctl explain`.

Kept are the requests in flight, which admission limits, and the last REQUESTS_MAX that ended, with IMAGES_MAX images
together: about 11 MB when full, 1.3 MB when each request had one image.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from epdd.dispatch.request import Request
from epdd.dispatch.request_record import QUOTED_CHARS_MAX, RequestRecord
from epdd.errors import EpddError, NotFound, WorkerTimeout

REQUESTS_MAX = 1024
IMAGES_MAX = 16 * REQUESTS_MAX      # media.max_images may be set higher: then fewer requests are kept
TIMER_S = 0.01                      # a loop's timer may be early by its resolution


class History:
    """All calls come from the event loop."""

    def __init__(self) -> None:
        self._running: dict[str, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque()
        self._images = 0                    # of those that ended

    @contextmanager
    def record(self, request: Request) -> Iterator[RequestRecord]:
        """The request's time in the pipeline; how the block ends says how the request did."""
        record = self._running[request.id] = request.record
        record.begin()
        try:
            yield record
            record.outcome = "completed"
        except EpddError as error:
            record.fail(error)
            raise
        except Exception as error:
            record.fail(EpddError(f"a bug: {type(error).__name__}"))
            raise
        except BaseException:               # closed or cancelled from outside
            if request.deadline and asyncio.get_running_loop().time() >= request.deadline - TIMER_S:
                record.fail(WorkerTimeout("the request was not finished before its deadline"))
            elif record.answered:
                record.outcome = "completed"
            else:
                record.outcome = "aborted"
            raise
        finally:
            record.end()
            self._running.pop(request.id, None)
            self._keep(record)

    def _keep(self, record: RequestRecord) -> None:
        self._ended.append(record)
        self._images += len(record.images)
        while len(self._ended) > REQUESTS_MAX or self._images > IMAGES_MAX:
            self._images -= len(self._ended.popleft().images)

    def last(self) -> list[dict[str, Any]]:
        """A summary of each request, the latest first."""
        return [record.summary() for record in self._latest_first()]

    def explain(self, name: str) -> dict[str, Any]:
        """A request by the answer's id, whole or without its kind, or by the x-request-id its client gave: the latest.

        Raises NotFound.
        """
        for record in self._latest_first():
            if name and name in (record.id, record.id.partition("-")[2], record.client_id):
                return record.explain()
        raise NotFound(f"no request {name[:QUOTED_CHARS_MAX]!r} among those running and the last {REQUESTS_MAX}; "
                       "one that was refused before any worker was asked is not kept")

    def _latest_first(self) -> Iterator[RequestRecord]:
        yield from reversed(self._running.values())
        yield from reversed(self._ended)
