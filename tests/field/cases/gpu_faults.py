"""D44 on GPUs: memory that runs out, errors, a card that is gone.  The GPU is a fake, the workers are the real ones."""

from __future__ import annotations

import os

from tests.field.cases import pictures
from tests.field.bench import Bench
from tests.field.table import case

COLOUR = "What colour is the circle?"
SECONDS = 30


def fresh(colour: str) -> bytes:
    """A picture that is in no cache."""
    return pictures.circle(colour, 100) + os.urandom(8)


async def ways(bench: Bench) -> list[str]:
    """The path of embeddings from encoder/0 to pd/0, once it is settled."""
    status = await bench.until(lambda s: all(pair["way"] == "gpu" for pair in s["transport"]["pairs"]
                                             if pair["encoder"] == "encoder/0"), SECONDS)
    return [pair["way"] for pair in status["transport"]["pairs"]]


@case("D44ig", "no GPU memory while encoding", "an allocation that fails once; one that fails again alone",
      "tried alone and answered; 503 for that item, the encoder goes on", daemon="gpu")
async def no_memory(bench: Bench) -> None:
    bench.daemon.ask("drain", worker="encoder/1")
    try:
        assert await ways(bench) == ["gpu", "host"]
        (bench.daemon.folder / "oom").write_text("x")
        assert await bench.answers(fresh("green"), COLOUR) == "green"
        (bench.daemon.folder / "oom").write_text("xoxo")
        reply = await bench.ask(fresh("blue"), COLOUR)
        assert (reply.status, reply.error["code"]) == (503, "out_of_memory") and reply.headers["Retry-After"]
        assert await bench.answers(fresh("red"), COLOUR) == "red"
        assert not (bench.daemon.folder / "oom").exists()
    finally:
        bench.daemon.ask("resume", worker="encoder/1")


@case("D44j", "GPU error, lost device", "an assert on the device; then the device is gone",
      "the encoder is back, the image answered; then given up at once, the others serve", kills=("encoder/0",),
      daemon="gpu")
async def gpu_lost(bench: Bench) -> None:
    folder = bench.daemon.folder
    before = bench.daemon.worker("encoder/0")["restarts"]
    bench.daemon.ask("drain", worker="encoder/1")
    (folder / "assert").write_text("x")
    try:
        assert await bench.answers(fresh("green"), COLOUR) == "green"
    finally:
        bench.daemon.ask("resume", worker="encoder/1")
    await bench.ready()
    worker = bench.daemon.worker("encoder/0")
    assert worker["restarts"] == before + 1
    assert worker["last_error"] == "exit code 79: its GPU failed: CUDA error: device-side assert triggered"
    assert await ways(bench) == ["gpu", "host"]
    bench.daemon.ask("drain", worker="encoder/1")
    (folder / "lost").touch()
    (folder / "assert").write_text("x")
    try:
        reply = await bench.ask(fresh("blue"), COLOUR)      # and no encoder is left
        assert (reply.status, reply.error["code"]) == (503, "no_worker")
        assert bench.daemon.worker("encoder/0")["state"] == "FAILED"
        assert bench.daemon.worker("encoder/0")["restarts"] == before + 1
        bench.daemon.ask("resume", worker="encoder/1")
        assert await bench.answers(fresh("red"), COLOUR) == "red"
        reply = await bench.get("/health")
        assert (reply.status, reply.body["status"]) == (200, "degraded")
        assert bench.status()["why"] == ["encoder/0 FAILED: GPU 0 is lost (GPU is lost): exit code 79: its GPU failed: "
                                         "CUDA error: device-side assert triggered"]
    finally:
        (folder / "lost").unlink(missing_ok=True)
        bench.daemon.ask("resume", worker="encoder/0")
        bench.daemon.ask("resume", worker="encoder/1")
