"""A fleet of fake workers behind the real supervisor, cache, encoding and pipeline, for tests."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass

from epdd import arena
from epdd.dispatch.admission import Admission
from epdd.dispatch.encoder_cache.cache import EncoderCache
from epdd.dispatch.encoding import Encoding
from epdd.dispatch.history import History
from epdd.dispatch.pipeline import Pipeline, Restarted
from epdd.dispatch.request import Image, Placed, Request
from epdd.dispatch.request_record import RequestRecord
from epdd.families.model_info import ModelInfo
from epdd.families.processor import CLIP_MEAN, CLIP_STD
from epdd.fleet.process import ForkServer
from epdd.fleet.supervisor import Supervisor
from epdd.fleet.worker import State
from epdd.settings.config import Config
from epdd.wire import Done, Sampling, Tokens, WorkerSpec
from tests.fleet.fake_worker import fingerprint

GUARD_S = 400       # a hang: a second's work has taken over a minute on a busy machine
ROWS = 16
FAMILY = ModelInfo("qwen3_vl", "/nowhere", 1, (2, 1, 3), 16, 2, 2, 3136, 1 << 20, CLIP_MEAN, CLIP_STD,
                   hidden=64, planes=1, max_model_len=4096, vocab=1000, eos_ids=(0,))
FORK_SERVER = ForkServer(["epdd.wire", "epdd.arena"], target="tests.fleet.fake_worker")


@dataclass
class Fleet:
    supervisor: Supervisor
    cache: EncoderCache
    encoding: Encoding
    admission: Admission
    pipeline: Pipeline
    history: History

    async def ready(self, *names):
        """Wait until these workers (all, if none is named) are READY."""
        wanted = names or [worker.name for worker in self.supervisor.workers]
        async with asyncio.timeout(GUARD_S):
            while not all(self.supervisor.find(name).state is State.READY for name in wanted):
                await asyncio.sleep(0.01)

    async def ask(self, request):
        """Token ids of each choice."""
        answers = {}
        async for index, event in self.pipeline.run(request):
            if isinstance(event, Restarted):
                answers.clear()
            elif isinstance(event, Tokens):
                answers.setdefault(index, []).extend(event.ids)
            elif isinstance(event, Done):
                answers.setdefault(index, []).append("end")
        return [answers[index] for index in sorted(answers)]

    def held(self, name):
        """Images handed to an encoder and not ended."""
        return self.encoding.router.replicas.by_name[name].held

    async def at_rest(self):
        """Wait until nothing is in flight; then every counter must be at its start."""
        async with asyncio.timeout(GUARD_S):
            while any(worker.in_flight for worker in self.supervisor.workers):
                await asyncio.sleep(0.01)
        assert self.cache.host.used_bytes == self.cache.host.cached_bytes and self.cache.waiting == 0
        assert all(e.ref_count == 0 and e.pins == 0 for e in self.cache._entries.values())
        router = self.encoding.router
        assert not router.queue and router.waiting == 0 and not self.encoding._jobs
        assert all(not replica.held for replica in router.replicas.by_name.values())
        assert router.replicas.in_flight == {"cpu": 0.0, "gpu": 0.0}


@asynccontextmanager
async def running(encoders=2, pds=1, arena_bytes=1 << 20, cache_bytes=1 << 20, config=Config(), devices={}, peers=(),
                  **manners):
    """Start the fleet and wait for it, unless its behaviour keeps it from starting.

    `devices`: name -> device, of workers not on CPUs; `peers`: GPUs whose memory prefill-decode workers can open.
    """
    names = [("encoder", i) for i in range(encoders)] + [("pd", i) for i in range(pds)]
    specs = [WorkerSpec(f"{role}/{i}", role, devices.get(f"{role}/{i}", "cpu"), (), None, 1, json.dumps(manners),
                        arena_bytes=arena_bytes, peers=peers) for role, i in names]
    cache = EncoderCache(arena_bytes, cache_bytes)
    fleet = None

    def changed(worker):
        fleet.pipeline.fleet_changed()

    supervisor = Supervisor(specs, arena.create(arena_bytes), config.fleet, FORK_SERVER, changed)
    admission = Admission(config.server.max_requests, supervisor, cache, FAMILY)
    history = History()
    encoding = Encoding(supervisor, cache, config, FAMILY)
    pipeline = Pipeline(supervisor, cache, encoding, admission, history)
    fleet = Fleet(supervisor, cache, encoding, admission, pipeline, history)
    supervisor.start()
    try:
        if not manners.get("bad_start"):
            await fleet.ready()
        yield fleet
    finally:
        await supervisor.stop()


def request(name, *images, max_tokens=3, record=None, **more):
    """A request for these image files, one placeholder span each."""
    parts = [Image(data, 32, 32, (1, 8, 8), ROWS, str(fingerprint(data))) for data in images]
    spans = [Placed(4 + i * (ROWS + 2), i) for i in range(len(parts))]
    return Request(record or RequestRecord(name), [7] * (4 + len(parts) * (ROWS + 2)), Sampling(max_tokens), parts,
                   spans, **more)


def expected(*images, max_tokens=3):
    """The fake PD worker's answer after reading these images' embeddings in this order."""
    return [*map(fingerprint, images), 4 + len(images) * (ROWS + 2), *range(1, max_tokens), "end"]
