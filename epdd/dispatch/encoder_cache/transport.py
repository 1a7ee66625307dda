"""How embeddings get from encoders to prefill-decode workers: by host memory, or by the memory of the encoder's GPU.

Keeps the pools in GPU memory and which workers have opened them.  An embedding stays on its encoder's GPU only if every
prefill-decode worker in service has opened that pool, so that any of them can serve the request.  Otherwise (no peer
access, or a worker on CPUs), and for encoders on CPUs, it goes by host memory.

When an encoder's process exits, its GPU memory disappears, even during a read.  Embeddings that were read after the
exit began count as lost, and the request is retried.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

from epdd.dispatch.encoder_cache.cache import HOST, EncoderCache, EncoderCacheEntry
from epdd.errors import WorkerLost
from epdd.fleet.process import leaving
from epdd.fleet.supervisor import Supervisor
from epdd.fleet.worker import State, Worker
from epdd.wire import CloseArena, GpuPool, OpenArena, Ready

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """The GPU memory pool of an encoder's present process."""

    arena: int
    encoder: Worker
    ready: Ready                # of that process
    pid: int
    pool: GpuPool

    @property
    def alive(self) -> bool:
        return self.encoder.ready is self.ready and self.encoder.state in (State.READY, State.DRAINING)


class EmbeddingTransport:
    """`fleet_changed` is called after every change of a worker's state, before anything else reacts to it."""

    def __init__(self, supervisor: Supervisor, cache: EncoderCache) -> None:
        self._supervisor = supervisor
        self._cache = cache
        self._numbers = count(HOST + 1)
        self._sources: dict[int, Source] = {}
        self._told: dict[str, tuple[Ready, set[int]]] = {}      # by worker: arenas that its present process was sent

    def fleet_changed(self) -> None:
        for source in [source for source in self._sources.values() if not source.alive]:
            del self._sources[source.arena]
            self._cache.lose_arena(source.arena)
        known = {id(source.ready) for source in self._sources.values()}
        for worker in self._supervisor.role("encoder"):
            if worker.ready is not None and worker.ready.pool is not None and id(worker.ready) not in known:
                self._add(worker, worker.ready, worker.ready.pool)
        pinned = all(worker.was_ready or worker.state is State.FAILED for worker in self._supervisor.role("encoder"))
        for worker in self._supervisor.workers:
            if worker.kind == "gpu" and worker.ready is not None and worker.spec.emulated is None:
                self._tell(worker, worker.ready, pinned)

    def _add(self, worker: Worker, ready: Ready, pool: GpuPool) -> None:
        if worker.process is None or worker.state not in (State.READY, State.DRAINING):
            return
        source = Source(next(self._numbers), worker, ready, worker.process.pid, pool)
        self._sources[source.arena] = source
        self._cache.add_arena(source.arena, pool.bytes)

    def _tell(self, worker: Worker, ready: Ready, pinned: bool) -> None:
        """Send a worker on a GPU the arenas that it should open or close."""
        if worker.channel is None or worker.state not in (State.READY, State.DRAINING):
            return
        if worker.name not in self._told or self._told[worker.name][0] is not ready:
            self._told[worker.name] = ready, set()
        known = self._told[worker.name][1]
        if pinned and HOST not in known:
            # Encoders have touched their pages by now.  Pinned earlier, all pages would lie on this worker's NUMA node.
            known.add(HOST)
            worker.channel.send(OpenArena(HOST))
        if worker.role != "pd":
            return
        for arena in known - self._sources.keys() - {HOST}:
            known.remove(arena)
            worker.arenas.pop(arena, None)
            worker.channel.send(CloseArena(arena))
        for source in self._sources.values():
            if source.arena not in known and source.encoder.spec.device in worker.spec.peers:
                known.add(source.arena)
                worker.channel.send(OpenArena(source.arena, source.pool))

    # --- for one image or request

    def arena_for(self, encoder: Worker) -> int:
        """Where the encoder writes next: its GPU's memory if all prefill-decode workers can read that, else HOST."""
        source = self._source(encoder)
        readers = [worker for worker in self._supervisor.role("pd") if worker.takes_work]
        if source is None or not readers or any(worker.arenas.get(source.arena) != "" for worker in readers):
            return HOST
        return source.arena

    def reads(self, worker: Worker, embeddings: Iterable[EncoderCacheEntry]) -> bool:
        """Whether a prefill-decode worker has opened the arenas of all these embeddings."""
        return all(worker.arenas.get(arena) == "" for arena in _arenas(embeddings))

    def give_up_unreadable(self, embeddings: Iterable[EncoderCacheEntry]) -> None:
        """If no prefill-decode worker will be able to read them all, drops those on GPUs and raises WorkerLost."""
        lying = [embedding for embedding in embeddings if embedding.lease.arena]
        if lying and not any(self._may_read(worker, lying) for worker in self._supervisor.role("pd")):
            for embedding in lying:
                self._cache.lose(embedding)
            raise WorkerLost("no prefill-decode worker can read the embeddings in the encoders' GPU memory")

    def _may_read(self, worker: Worker, embeddings: Iterable[EncoderCacheEntry]) -> bool:
        """Whether the worker can read them, or may be able to later."""
        return worker.comes_back and all(
            not worker.arenas.get(arena) and self._sources[arena].encoder.spec.device in worker.spec.peers
            for arena in _arenas(embeddings))

    def check(self, embeddings: Iterable[EncoderCacheEntry]) -> None:
        """Raises WorkerLost if an embedding was, or may have been, lost with its encoder's process."""
        gone = [embedding for embedding in embeddings if embedding.lost or not self._alive(embedding.lease.arena)]
        for embedding in gone:
            # At once, not only after the encoder's exit: the retry must not find it in the cache.
            self._cache.lose(embedding)
        if gone:
            raise WorkerLost("an encoder was lost, and with it embeddings in its GPU memory")

    def _source(self, encoder: Worker) -> Source | None:
        return next((source for source in self._sources.values() if source.encoder is encoder), None)

    def _alive(self, arena: int) -> bool:
        source = self._sources.get(arena)
        return arena == HOST or source is not None and not leaving(source.pid)

    # --- status

    def pairs(self) -> list[dict[str, Any]]:
        """How each encoder's embeddings get to each prefill-decode worker, and why not by GPU memory."""
        return [{"encoder": encoder.name, "pd": pd.name} | self._way(encoder, pd)
                for encoder in self._supervisor.role("encoder") for pd in self._supervisor.role("pd")]

    def _way(self, encoder: Worker, pd: Worker) -> dict[str, Any]:
        source = self._source(encoder)
        if encoder.kind == "cpu" or pd.kind == "cpu":
            why: str | None = "on CPUs"
        elif source is None:
            why = f"{encoder.name} has no memory to share" if encoder.ready else f"{encoder.name} is not ready"
        elif encoder.spec.device not in pd.spec.peers:
            why = f"{pd.spec.device} cannot read {encoder.spec.device}"
        elif pd.arenas.get(source.arena) == "":
            others = [worker.name for worker in self._supervisor.role("pd")
                      if worker.takes_work and worker.arenas.get(source.arena) != ""]
            why = f"{', '.join(others)} cannot read it" if others else None
        else:
            why = pd.arenas.get(source.arena, f"{pd.name} has not opened it")
        pinned = any(worker.arenas.get(HOST) == "" for worker in (encoder, pd))
        return {"way": "gpu" if why is None else "host", "why": why, "pinned": why is not None and pinned}

    def pools(self) -> list[dict[str, Any]]:
        return [{"encoder": source.encoder.name, "device": source.encoder.spec.device, "bytes": source.pool.bytes,
                 "used_bytes": self._cache.arenas[source.arena].used_bytes,
                 "cached_bytes": self._cache.arenas[source.arena].cached_bytes}
                for source in self._sources.values()]


def _arenas(embeddings: Iterable[EncoderCacheEntry]) -> set[int]:
    """The arenas on GPUs that hold them."""
    return {embedding.lease.arena for embedding in embeddings} - {HOST}
