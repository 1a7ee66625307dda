"""Real worker processes, forked from a real fork server, spoken to over their sockets."""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from epdd import arena, families, wire
from epdd.fleet.process import ForkServer, Process
from tests.frontend.http import hostile
from tests.models import checkpoints
from tests.worker.language import pd

pytestmark = pytest.mark.takes(30)

HANG_S = 60.0           # seconds: a hang


class Worker:
    """One process and the daemon's end of its socket."""

    def __init__(self, server: ForkServer, spec: wire.WorkerSpec, arena_fd: int) -> None:
        self.socket, theirs = wire.socket_pair()
        self.process: Process = asyncio.run(server.spawn(spec, theirs, arena_fd))
        theirs.close()
        self.socket.settimeout(HANG_S)
        self._file = self.socket.makefile("rb")

    def send(self, message: wire.ToWorker, raw: bytes = b"") -> None:
        self.socket.sendall(wire.pack(message, raw))

    def read(self) -> wire.FromWorker:
        header, raw = wire.lengths(self._file.read(wire.HEAD.size))
        assert raw == 0
        return wire.from_worker(self._file.read(header))

    def until(self, *kinds: type) -> list[wire.FromWorker]:
        """Messages without heartbeats, up to the first of these kinds."""
        seen = []
        while not seen or not isinstance(seen[-1], kinds):
            message = self.read()
            if not isinstance(message, wire.Heartbeat):
                seen.append(message)
        return seen

    def hang_up(self) -> None:
        self._file.close()
        self.socket.close()

    def exit_code(self) -> int:
        return asyncio.run(asyncio.wait_for(self.process.wait(), HANG_S))

    def status(self, field: str) -> int:
        """A number of /proc/PID/status."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1])
        raise KeyError(field)


Start = Callable[..., Worker]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    server = ForkServer(["epdd.worker.preload"])
    fd = arena.create(pd.ARENA_BYTES)
    workers: list[Worker] = []

    def begin(folder: str, role: str, **options: Any) -> Worker:
        workers.append(Worker(server, pd.spec(folder, role, heartbeat_s=0.1, **options), fd))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.hang_up()
        worker.process.kill()
    server.stop()
    os.close(fd)


def image_bytes(width: int, height: int) -> bytes:
    file = io.BytesIO()
    checkpoints.picture(width, height).save(file, "PNG")
    return file.getvalue()


def test_an_image_and_its_answer_through_two_processes(checkpoint: Callable[..., str], start: Start) -> None:
    folder = checkpoint("qwen3_vl")
    family = families.load(folder)
    encoder = start(folder, "encoder", arena_slice=(0, pd.ARENA_BYTES))
    seen = encoder.until(wire.Ready)
    ready = seen[-1]
    stages = [m.stage for m in seen if isinstance(m, wire.Loading)]
    assert list(dict.fromkeys(stages)) == ["import", "arena", "weights", "warm-up"]
    assert isinstance(ready, wire.Ready) and ready.arena_huge_bytes in (0, pd.ARENA_BYTES)
    assert ready.samples and 0 < ready.seconds < 600 and ready.binding.threads == 1
    prompt = pd.prompt(folder, [4, checkpoints.picture(100, 60), 6])
    grid = family.grid(100, 60)
    rows = family.rows(grid)
    lease = wire.Lease(4096, family.embedding_bytes(rows))
    encoder.send(wire.Encode("bad", lease, grid, rows, (100, 60)), b"hello")
    encoder.send(wire.Encode("good", lease, grid, rows, (100, 60)), image_bytes(100, 60))
    failed, encoded = encoder.until(wire.Encoded)
    assert isinstance(failed, wire.Failed) and (failed.id, failed.code) == ("bad", "invalid_image_format")
    assert isinstance(encoded, wire.Encoded) and encoded.bytes == lease.size

    worker = start(folder, "pd")
    ready = worker.until(wire.Ready)[-1]
    assert isinstance(ready, wire.Ready) and ready.kv_tokens == 4096
    end = time.monotonic() + 30     # it maps what the encoder has reserved, beside its loading
    while worker.status("RssShmem") << 10 < pd.ARENA_BYTES and time.monotonic() < end:
        time.sleep(0.01)
    assert worker.status("RssShmem") << 10 == pd.ARENA_BYTES
    span = wire.Span(prompt.starts[0], rows, grid, lease, "float32", "x")
    worker.send(wire.Generate("a", (span,), wire.Sampling(max_tokens=8, temperature=0.0)),
                np.array(prompt.tokens, np.int32).tobytes())
    answer = worker.until(wire.Done)
    tokens = [t for m in answer if isinstance(m, wire.Tokens) for t in m.ids]
    wanted = checkpoints.reference_generate(folder, prompt.tokens, prompt.images, 8)
    assert tokens == [t for t in wanted if t not in family.eos_ids]

    raw = np.zeros(1000, np.int32).tobytes()
    for name in ("b", "c"):
        worker.send(wire.Generate(name, (), wire.Sampling(max_tokens=2000, ignore_eos=True)), raw)
    worker.until(wire.Tokens)
    worker.send(wire.Cancel("b"))
    assert worker.until(wire.Cancelled)[-1] == wire.Cancelled("b")
    worker.hang_up()        # in the middle of c
    assert worker.exit_code() == 0
    encoder.hang_up()       # while idle
    assert encoder.exit_code() == 0


def test_the_fork_server_stays_single_threaded(checkpoint: Callable[..., str], start: Start) -> None:
    worker = start(checkpoint("qwen3_vl"), "pd")
    worker.until(wire.Ready)
    server = worker.status("PPid")
    status = Path(f"/proc/{server}/status").read_text()
    assert "Threads:\t1\n" in status
    assert Path(f"/proc/{worker.process.pid}/comm").read_text().strip() == "epdd pd/0"
    worker.hang_up()
    assert worker.exit_code() == 0


def test_garbage_ends_the_worker_with_a_word(checkpoint: Callable[..., str], start: Start) -> None:
    worker = start(checkpoint("qwen3_vl"), "encoder", arena_slice=(0, 4096))
    worker.until(wire.Ready)
    worker.socket.sendall(b"\xff" * 100)
    last = worker.until(wire.Failed)[-1]
    assert isinstance(last, wire.Failed) and (last.id, last.code) == ("", "protocol_error")
    assert worker.exit_code() == 1


def test_a_bad_checkpoint_is_told_and_exits_78(checkpoint: Callable[..., str], start: Start, tmp_path: Path) -> None:
    for path in Path(checkpoint("qwen3_vl")).iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    for role in ("encoder", "pd"):
        worker = start(str(tmp_path), role)
        last = worker.until(wire.Failed)[-1]
        assert isinstance(last, wire.Failed) and (last.id, last.code) == ("", "bad_model")
        assert worker.exit_code() == 78


def test_an_encoder_gives_back_what_large_images_took(checkpoint: Callable[..., str], start: Start) -> None:
    folder = checkpoint("qwen3_vl")
    family = families.load(folder)
    worker = start(folder, "encoder", arena_slice=(0, pd.ARENA_BYTES))
    worker.until(wire.Ready)
    lease = wire.Lease(0, pd.ARENA_BYTES)

    def encode(said: tuple[int, int], data: bytes) -> wire.FromWorker:
        grid = family.grid(*said)
        worker.send(wire.Encode("x", lease, grid, family.rows(grid), said), data)
        return worker.until(wire.Encoded, wire.Failed)[-1]

    side = 4000                 # 48 MB of pixels, and as much again where colours are converted
    files = []
    for mode, form in (("RGB", "PNG"), ("RGBA", "PNG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("P", "GIF")):
        file = io.BytesIO()
        Image.new(mode, (side, side)).save(file, form)
        files.append(file.getvalue())
    small = image_bytes(100, 60)
    assert isinstance(encode((100, 60), small), wire.Encoded)
    before = worker.status("RssAnon")
    for data in files:
        assert isinstance(encode((side, side), data), wire.Encoded)
    peak, now = worker.status("VmHWM"), worker.status("RssAnon")
    assert peak - before > 40_000           # it did take them, in KiB
    assert now - before < 20_000
    # A header that says less than there is costs nothing at all.
    for lying in (hostile.two_headers(64, 8000), hostile.another_chunk_first(64, 8000),
                  hostile.empty_sub_block(64, 8000)):
        answer = encode((64, 64), lying)
        assert isinstance(answer, wire.Failed) and answer.code == "image_parse_error"
    assert worker.status("VmHWM") == peak
    worker.hang_up()


@pytest.mark.slow
def test_the_daemons_end_is_noticed_in_a_long_kernel(checkpoint: Callable[..., str], start: Start) -> None:
    folder = checkpoint("qwen3_vl", size=checkpoints.Size(vision_layers=12, vision_hidden=128, vision_inter=512,
                                                          max_pixels=2048 * 2048))
    family = families.load(folder)
    worker = start(folder, "encoder", arena_slice=(0, pd.ARENA_BYTES))
    worker.until(wire.Ready)
    grid = family.grid(2048, 2048)
    rows = family.rows(grid)
    file = io.BytesIO()
    Image.new("RGB", (2048, 2048)).save(file, "BMP")
    worker.send(wire.Encode("x", wire.Lease(0, pd.ARENA_BYTES), grid, rows, (2048, 2048)), file.getvalue())
    time.sleep(1.0)
    worker.hang_up()
    begin = time.monotonic()
    assert worker.exit_code() == 0 and time.monotonic() - begin < 15    # the work itself takes longer


@pytest.mark.slow
def test_each_process_holds_its_half_only(checkpoint: Callable[..., str], start: Start) -> None:
    """Resident memory over that of a tiny model's worker stays near the half's own size."""
    tiny, big = checkpoint("qwen3_vl"), checkpoint("qwen3_vl", size=checkpoints.BIG)
    resident, parameters = dict[tuple[str, str], int](), dict[str, int]()
    for role in ("encoder", "pd"):
        for folder in (tiny, big):
            worker = start(folder, role, kv_tokens=128, arena_slice=(0, 4096))
            ready = worker.until(wire.Ready)[-1]
            assert isinstance(ready, wire.Ready)
            resident[role, folder] = worker.status("VmRSS") * 1024
            parameters[role] = ready.parameters
            worker.hang_up()
            worker.exit_code()
    whole = 4 * sum(parameters.values())
    for role, count in parameters.items():
        more = resident[role, big] - resident[role, tiny]
        assert 4 * count < 0.7 * whole
        assert more < 4 * count + 0.15 * whole, f"{role} holds {more} bytes for {4 * count} of weights"
