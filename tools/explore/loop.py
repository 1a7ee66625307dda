"""The event loop of explored schedules: a `World` decides its clock and the order of events.

The loop itself is asyncio's.  Its selector, where a real loop waits for events, asks the `World` what happens next.
Time passes only when the world says so.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


CANCELS_MAX = 5             # some tasks await others while they are cancelled


class Action(NamedTuple):
    """Something that may happen next."""

    name: str
    call: Callable[..., None]
    args: tuple[Any, ...] = ()


class Choices(Protocol):
    """Decides what happens."""

    def choose(self, actions: Sequence[Action]) -> Action:
        """Choose one of these."""

    def now_and_then(self) -> bool:
        """Whether a fault may happen this time."""


class AtRandom:
    """The schedule of a seed."""

    def __init__(self, rng: random.Random, faults: float) -> None:
        """`faults`: the share of choices in which a fault may happen, 0 to 1."""
        self._rng = rng
        self._faults = faults

    def choose(self, actions: Sequence[Action]) -> Action:
        return actions[int(self._rng.random() * len(actions))]

    def now_and_then(self) -> bool:
        return self._rng.random() < self._faults


class Path:
    """Takes the choices of `begin`, then the first of each."""

    def __init__(self, begin: Sequence[int]) -> None:
        self._begin = begin
        self.taken: list[tuple[int, int]] = []      # (choice, number of choices)

    def choose(self, actions: Sequence[Action]) -> Action:
        at = len(self.taken)
        choice = self._begin[at] if at < len(self._begin) else 0
        self.taken.append((choice, len(actions)))
        return actions[choice]

    def now_and_then(self) -> bool:
        return True


def all_paths() -> Iterator[Path]:
    """Every path, depth first; run each to its end before asking for the next."""
    begin: list[int] = []
    while True:
        path = Path(begin)
        yield path
        taken = path.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        begin = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]


class World(Protocol):
    def happen(self, timeout: float | None) -> float:
        """Let something happen, or nothing.  Returns the seconds that pass.

        `timeout`: 0 if callbacks are ready, else the seconds until the next timer, None without one.
        """


class _Twilight:
    """A world in which only time passes."""

    def happen(self, timeout: float | None) -> float:
        return timeout or 0.0


class _Selector(selectors.BaseSelector):
    """Watches no files."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.now = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.world is not None:
            self.now += self.world.happen(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


class Loop(asyncio.SelectorEventLoop):
    """asyncio's loop in a world of its own."""

    def __init__(self) -> None:
        self._world_selector = _Selector()
        super().__init__(self._world_selector)

    def _make_self_pipe(self) -> None:
        """No other thread wakes this loop; its sockets would take a fifth of a schedule's time."""

    _close_self_pipe = _make_self_pipe

    def time(self) -> float:
        return self._world_selector.now

    def run_in_executor(self, executor: Any, call: Any, *args: Any) -> Any:
        """Runs it at once: no other thread can wake this loop."""
        future = self.create_future()
        future.set_result(call(*args))
        return future

    def give_up(self) -> None:
        """Cancel the rest of a schedule after a violation."""
        self.set_exception_handler(lambda loop, context: None)
        self.live_in(_Twilight())
        for _ in range(CANCELS_MAX):
            if not (left := asyncio.all_tasks(self)):
                return
            for task in left:
                task.cancel()
            self.run_until_complete(asyncio.wait(left, timeout=1.0))

    def live_in(self, world: World) -> None:
        self._world_selector.world = world
