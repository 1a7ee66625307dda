"""Fakes of worker processes and their sockets for explored schedules.

A process reads frames, works and answers as the real ones do, in small steps that the schedule chooses.  A pipe lies
between it and the daemon, so that requests and answers can cross.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from tools.explore.loop import Action
from tools.explore.memory import NOBODY, Memory, touched

from epdd.errors import ProtocolError
from epdd.fleet import channel
from epdd.wire import (Binding, Cancel, Cancelled, CloseArena, Done, Encode, Encoded, Failed, FrameBuffer, FromWorker,
                       Generate, Lease, OpenArena, Prefilled, Ready, Tokens, WorkerSpec, to_worker)

EXIT_KILLED = -9
GARBAGE = object()          # a frame that breaks the wire format


@dataclass
class Task:
    """A piece of work in its process."""

    message: Encode | Generate
    raw: bytes
    read: tuple[int, ...] | None = None         # Generate: contents of its leases
    told: int = 0                               # tokens


@dataclass(frozen=True)
class Manners:
    """Behaviour of images and prompts, by the first byte of an image and the first token of a prompt."""

    bad: int = 250              # cannot be decoded
    lie: int = 251              # encoded to the wrong size
    deadly: int = 252           # crashes its worker
    encode_s: float = 0.05      # seconds that encoders report for an image


class Process:
    """Fake of epdd.fleet.process.Process, the worker in it, and its end of the socket."""

    _pids = count(1)

    def __init__(self, spec: WorkerSpec, link: Link, memory: Memory, manners: Manners,
                 died: Callable[[], None]) -> None:
        self.spec = spec
        self.pid = next(self._pids)
        self.alive, self.ready, self.told_to_end = True, False, False
        self.killed_at: float | None = None
        self.works: dict[str, Task] = {}
        self._link = link
        self._memory = memory
        self._manners = manners
        self._died = died
        self._frames = FrameBuffer(to_worker)
        self.inbox: deque[tuple[Any, bytes]] = deque()
        self.outbox: deque[Any] = deque()
        self.code: int | None = None
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        memory.processes.append(self)
        link.process = self

    # --- for the supervisor

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self.told_to_end = True

    def kill(self) -> None:
        self.killed_at = self.killed_at or time.monotonic()
        self.terminate()

    @property
    def seen(self) -> bool:
        """Whether the supervisor knows that it is gone."""
        return self._ended.done()

    # --- for the memory

    def touches(self) -> Iterator[tuple[Lease, bool]]:
        """Pages that it may read or write from now on, by its work and the frames in its pipe."""
        if self.alive:
            for task in self.works.values():
                if task.read is None:
                    yield from touched(task.message)
            for message, _ in self.inbox:
                if not isinstance(message, Cancel):
                    yield from touched(message)

    # --- its actions

    def receive(self, frame: bytes) -> None:
        """A frame from the daemon; dropped if the process is dead."""
        for message, raw in self._frames.feed(frame):
            # Frames about arenas have no effect: none of these processes has GPU memory.
            if self.alive and not isinstance(message, (OpenArena, CloseArena)):
                if not isinstance(message, Cancel):
                    self._memory.handed_over(self, message)
                self.inbox.append((message, raw))

    def actions(self) -> Iterator[Action]:
        name = self.spec.name
        if self.alive and not self.ready:
            yield Action(f"{name} is ready", self._start)
        if self.alive and self.inbox:
            yield Action(f"{name} takes {type(self.inbox[0][0]).__name__}", self._take)
        if self.alive and self.told_to_end:
            yield Action(f"{name} ends", self.die, (0,))
        if self.alive:
            for work_id in self.works:
                yield Action(f"{name} works on {work_id}", self._step, (work_id,))
        if self.outbox:
            yield Action(f"{name} is heard", self._deliver)
        if not self.alive and self.code is not None and not self._ended.done():
            yield Action(f"{name} is seen to be gone", self._reap)

    def take_works(self) -> None:
        """Take all works before the first Cancel."""
        while self.alive and self.inbox and not isinstance(self.inbox[0][0], Cancel):
            self._take()

    def be_heard(self) -> bool:
        """Deliver all its frames; False if there are none."""
        said = bool(self.outbox)
        while self.outbox:
            self._deliver()
        return said

    def die(self, code: int) -> None:
        """It touches no memory any more; its frames may still be delivered."""
        self.alive = False
        self.code = code
        self.inbox.clear()
        self.works.clear()
        self._memory.processes.remove(self)
        if not self.outbox:
            self._link.end()

    def garble(self) -> None:
        self.outbox.append(GARBAGE)

    def _reap(self) -> None:
        assert self.code is not None
        self._ended.set_result(self.code)

    def _deliver(self) -> None:
        self._link.arrive(self.outbox.popleft())
        if not self.alive and not self.outbox:
            self._link.end()

    def _start(self) -> None:
        self.ready = True
        seconds = self._manners.encode_s
        samples = ((64, seconds), (128, 2 * seconds)) if self.spec.role == "encoder" else ()
        self._say(Ready(Binding((), (), 1), "float32", kv_tokens=4096, max_model_len=4096, samples=samples))

    def _say(self, message: FromWorker) -> None:
        self.outbox.append(message)

    def _take(self) -> None:
        message, raw = self.inbox.popleft()
        if not isinstance(message, Cancel):
            self.works[message.id] = Task(message, raw)
            if isinstance(message, Encode):
                self._memory.write(message.lease, NOBODY)       # a partial write does not count
        elif self.works.pop(message.id, None) is not None:
            self._say(Cancelled(message.id))

    def _step(self, work_id: str) -> None:
        task = self.works[work_id]
        if task.raw[0] == self._manners.deadly:
            self._died()
            self.die(EXIT_KILLED)
        elif isinstance(task.message, Encode):
            del self.works[work_id]
            self._encode(task.message, task.raw[0])
        else:
            self._generate(task.message, task)

    def _encode(self, message: Encode, image: int) -> None:
        if image == self._manners.bad:
            self._say(Failed(message.id, "image_parse_error", "not an image"))
            return
        self._memory.write(message.lease, image)
        # bfloat16: half of the lease.
        size = message.lease.size // 2
        self._say(Encoded(message.id, message.rows + (image == self._manners.lie), size, "bfloat16", 0.1))

    def _generate(self, message: Generate, task: Task) -> None:
        if task.read is None:
            task.read = tuple(self._memory.read(span.lease) for span in message.spans)
            self._say(Prefilled(message.id))
        elif task.told < message.sampling.max_tokens:
            task.told += 1
            self._say(Tokens(message.id, (len(task.read), *task.read)))
        else:
            del self.works[message.id]
            self._say(Done(message.id, "length"))


class Link:
    """The daemon's end of a socket."""

    def __init__(self) -> None:
        self.process: Process | None = None
        self.closed = False
        self.other = self           # the worker's end, which is passed on at the spawn
        self._arrived: deque[Any] = deque()
        self._over = False
        self._wake: asyncio.Future[None] | None = None

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """The daemon's end and a fake of the worker's."""
        ours, theirs = cls(), cls()
        theirs.other = ours
        return ours, theirs

    def setblocking(self, flag: bool) -> None:
        """As socket's."""

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc: object) -> None:
        """The daemon closes the worker's end once the worker has its own."""

    def close(self) -> None:
        self.closed = True
        if self.process is not None:
            self.process.told_to_end = True
        self.end()

    def arrive(self, message: Any) -> None:
        self._arrived.append(message)
        self._look()

    def end(self) -> None:
        self._over = True
        self._look()

    def _look(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def next(self) -> Any:
        """The worker's next frame; None at the end."""
        while not self._arrived:
            if self._over:
                return None
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return self._arrived.popleft()


class Channel(channel.Channel):
    """The real one over a `Link`; counts how often each work ends."""

    ends: dict[str, int]        # of all channels of a schedule

    def __init__(self, link: Any) -> None:
        super().__init__(link)
        self._link: Link = link

    async def read(self, on_message: Any) -> None:
        while (message := await self._link.next()) is not None:
            if message is GARBAGE:
                raise ProtocolError("garbled")
            self.last_heard = time.monotonic()
            self._route(message, on_message)

    def _write(self, frame: bytes) -> None:
        if not self._link.closed and self._link.process is not None:
            self._link.process.receive(frame)

    def start(self, message: Any, *args: Any) -> channel.Work:
        work = super().start(message, *args)
        self.ends[work.id] = 0

        def ended() -> None:
            self.ends[work.id] += 1

        work.on_end(ended)
        return work
