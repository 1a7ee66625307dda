"""Invariants at the end of an explored schedule."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tools.explore.fleet import Channel
from tools.explore.memory import Violation
from tools.explore.scenario import MANNERS, Asker, Scenario, pages_of

from epdd.errors import ArenaFull, MediaError, NoWorker, ProtocolError, Rejected, WorkerLost, WorkerTimeout
from epdd.wire import Done, Prefilled, Tokens

if TYPE_CHECKING:
    from tools.explore.run import ExploredDaemon


def check_rest(daemon: ExploredDaemon) -> None:
    """Every gauge is back at its start, and every work has ended once."""
    if wrong := {work: ends for work, ends in Channel.ends.items() if ends != 1}:
        raise Violation(f"works that did not end once: {wrong}")
    cache, router = daemon.cache, daemon.encoding.router
    rest = {"admitted": daemon.admission.in_flight, "bytes in use": cache.host.used_bytes - cache.host.cached_bytes,
            "waiting for room": cache.waiting,
            "references": sum(entry.ref_count for entry in cache._entries.values()),
            "pins": sum(entry.pins for entry in cache._entries.values()),
            "queue": len(router.queue), "queue's cost": router.waiting, "jobs": len(daemon.encoding._jobs),
            "in replicas": sum(len(replica.held) for replica in router.replicas.by_name.values()),
            "in flight": sum(router.replicas.in_flight.values()),
            "isolated": int(daemon.encoding.crashes.isolating)}
    if left := {name: value for name, value in rest.items() if value}:
        raise Violation(f"left at rest: {left}")
    if cache.host.cached_bytes > cache.cache_limit:
        raise Violation("the cache is over its limit")


def check_outcome(asker: Asker, given: Scenario, happened: Counter[str]) -> None:
    """The answer is right and complete, or its error has a cause in the schedule.  Raises Violation."""
    ask, error = asker.ask, asker.error
    by_choice: dict[int, list[Any]] = {}
    for index, event in asker.told:
        by_choice.setdefault(index, []).append(event)
    for events in by_choice.values():
        # A retry may begin after the first attempt's Prefilled.
        while len(events) > 1 and isinstance(events[0], Prefilled) and isinstance(events[1], Prefilled):
            events.pop(0)
        answer = [len(ask.images), *ask.images]
        if not isinstance(events[0], Prefilled) or any(
                list(event.ids) != answer for event in events if isinstance(event, Tokens)):
            raise Violation(f"{asker.request.id} was told {events}, not of {answer}")
    if asker.outcome == "completed":
        whole = [[type(event) for event in events] for events in by_choice.values()]
        if whole != [[Prefilled, *[Tokens] * ask.max_tokens, Done]] * ask.n:
            raise Violation(f"{asker.request.id} completed with {whole}")
        if {MANNERS.bad, MANNERS.lie} & set(ask.images):
            raise Violation(f"{asker.request.id} has an image that cannot be encoded, and completed")
    if asker.anew > min(1, sum(happened[kind] for kind in ("death", "order"))):
        raise Violation(f"{asker.request.id} began anew {asker.anew} times")
    if asker.outcome == "cancelled" and not happened["cancel"]:
        raise Violation(f"{asker.request.id} was cancelled without a cause")
    elif error is not None and not _fair(asker, error, given, happened):
        raise Violation(f"{asker.request.id} failed for no reason: {type(error).__name__}: {error}")


def _fair(asker: Asker, error: Exception, given: Scenario, happened: Counter[str]) -> bool:
    """Whether the schedule explains the error."""
    ask, started = asker.ask, any(isinstance(event, Tokens) for _, event in asker.told)
    orders = happened["order"]
    losses = orders + happened["death"]       # at most
    if isinstance(error, MediaError):
        return MANNERS.bad in ask.images
    if isinstance(error, ProtocolError):
        return MANNERS.lie in ask.images
    if isinstance(error, WorkerTimeout):
        return ask.deadline_s > 0
    if isinstance(error, ArenaFull):
        return sum(pages_of(image) for image in set(ask.images)) > given.pages
    if isinstance(error, WorkerLost) and started and not (ask.whole and asker.request.has_images):
        return losses > 0
    if isinstance(error, (WorkerLost, Rejected)):
        return losses > 1       # one loss is retried, except for a stream with a token and for released images
    return isinstance(error, NoWorker) and (orders > 0 or losses > 1)
