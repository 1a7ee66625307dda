"""D44: faults of processes, and clients' request ids."""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import signal
import socket
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.daemon import ROOT, START_S, running
from tests.field.cases import pictures
from tests.field.bench import SETTLE_S, Bench, Reply, asking
from tests.field.table import case
from tests.memory_group import group_of, memory_group

COLOUR = "What colour is the circle?"
# A daemon of its own, without torch: it starts in a second.
LIGHT = {"emulation__profile": "router-table", "encoder__workers": "gpu:1", "pd__workers": "gpu:1"}


@case("D44a", "the encoder rejects the image", "a right header with damaged pixels",
      "the encoder's 400 at once")
async def rejected(bench: Bench) -> None:
    picture = pictures.photo()
    replies = await asyncio.gather(*(bench.ask(picture[:-cut], COLOUR, stream=cut % 2 == 0) for cut in range(40, 48)))
    assert {(reply.status, reply.error["code"]) for reply in replies} == {(400, "image_parse_error")}
    assert max(reply.seconds for reply in replies) < SETTLE_S      # no retry waited for, and no deadline


@case("D44b", "200 images at once", "one encoder, the other is drained",
      "200 right answers, or 429 and 503")
async def burst(bench: Bench) -> None:
    colours = ("red", "green", "blue")
    # Bytes after an image's end make another file of the same picture.
    bodies = [(colours[i % 3], asking(pictures.circle(colours[i % 3]) + bytes([44, i]), COLOUR)) for i in range(200)]
    bench.daemon.ask("drain", worker="encoder/1")
    try:
        replies = await asyncio.gather(*(bench.post(body) for _, body in bodies))
    finally:
        bench.daemon.ask("resume", worker="encoder/1")
    for (colour, _), reply in zip(bodies, replies):
        assert reply.said == colour if reply.status == 200 else reply.status in (429, 503)
    good = [reply for reply in replies if reply.status == 200]
    assert len(good) > 100 and len({reply.id for reply in replies}) == 200


@case("D44g", "counters after errors", "1,000 requests, 24 at a time: good, refused, leaving; two encoders",
      "every counter is zero, both encoders had work")
async def storm(bench: Bench) -> None:
    before = {w["name"]: w["done"] for w in bench.status()["workers"]}
    outcomes: Counter[str] = Counter()
    gate = asyncio.Semaphore(24)
    broken = pictures.photo()[:-50]

    async def one(i: int) -> None:
        colour = ("red", "green", "blue")[i % 3]
        image = broken + bytes([i % 256]) if i % 5 == 1 else pictures.circle(colour, 120 + i // 3 % 20)
        body = asking(image, COLOUR, stream=i % 2 == 0)
        if i % 5 == 2:
            body["top_p"] = -1
        if i % 5 == 3:
            body |= {"max_tokens": 200, "ignore_eos": True}
        async with gate:
            try:
                async with asyncio.timeout(i % 17 * 0.02 if i % 5 == 3 else 60):
                    reply = await bench.post(body)
            except TimeoutError:
                outcomes["left"] += 1
                return
        if reply.status == 200:
            outcomes["good" if reply.said.startswith(colour) else "wrong"] += 1
        elif reply.status == 400 and i % 5 in (1, 2):
            outcomes["refused"] += 1
        else:
            outcomes["busy" if reply.status == 429 else "wrong"] += 1

    await asyncio.gather(*(one(i) for i in range(1000)))
    assert outcomes.total() == 1000 and outcomes["wrong"] == 0, outcomes
    assert min(outcomes[kind] for kind in ("good", "refused", "left")) > 100, outcomes
    done = {w["name"]: w["done"] - before[w["name"]] for w in bench.status()["workers"]}
    # The division of work depends on each encoder's speed at that moment.
    assert min(done["encoder/0"], done["encoder/1"]) > 0, done


@case("D44h", "trust between processes", "listeners; garbage to every socket; unpickled messages",
      "loopback or 0600; only that connection ends; none from another process")
async def trust(bench: Bench) -> None:
    daemon = psutil.Process(bench.daemon.process.pid)
    family = [daemon, *daemon.children(recursive=True)]
    listening = [c.laddr for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {(address.ip, address.port) for address in listening} == {("127.0.0.1", bench.daemon.port)}
    assert stat.S_IMODE(bench.daemon.socket_path.stat().st_mode) == 0o600
    sockets: tuple[tuple[int, Any], ...] = ((socket.AF_UNIX, str(bench.daemon.socket_path)),
                                            (socket.AF_INET, ("127.0.0.1", bench.daemon.port)))
    for kind, address in sockets:
        for garbage in (b"\x80\x04cos\nsystem\n(S'true'\ntR.\n", b"\0" * 200_000 + b"\n",
                        b"\xff\xff\xff\x7f" * 100 + b"\r\n\r\n", b'{"verb": []}\n'):
            with socket.socket(kind) as client:
                client.connect(address)
                try:
                    client.sendall(garbage)
                except ConnectionError:
                    pass        # hung up on
            assert bench.status()["state"] == "ready"
    # Workers are connected by socket pairs without names; their messages are parsed field by field, never unpickled.
    words = re.compile(r"\b(pickle\.|import (pickle|marshal|shelve|dill)\b|torch\.load\b|(?<!\.)(eval|exec)\()")
    assert [path.name for path in (ROOT / "epdd").rglob("*.py") if words.search(path.read_text())] == []


@asynccontextmanager
async def held_by_one(bench: Bench) -> AsyncIterator[dict[str, Any]]:
    """Eight image requests wait for encoder/0, which is stopped; yields its status.

    Afterwards all must be answered rightly by the other encoder.
    """
    colours = ("red", "green", "blue")
    bodies = [asking(pictures.circle(colours[i % 3]) + random.randbytes(8), COLOUR) for i in range(8)]
    bench.daemon.ask("drain", worker="encoder/1")
    worker = bench.daemon.worker("encoder/0")
    os.kill(worker["pid"], signal.SIGSTOP)
    asks = [asyncio.create_task(bench.post(body)) for body in bodies]
    await bench.until(lambda s: s["router"]["queue_jobs"] < 8 == s["router"]["queue_jobs"] + next(
        w["in_flight"] for w in s["workers"] if w["name"] == "encoder/0"), START_S)
    bench.daemon.ask("resume", worker="encoder/1")
    yield worker
    assert [reply.said for reply in await asyncio.gather(*asks)] == [colours[i % 3] for i in range(8)]


async def degraded(bench: Bench) -> None:
    """Wait until /health says degraded; text is still answered."""
    while (reply := await bench.get("/health")).body["status"] != "degraded":
        await asyncio.sleep(0.01)
    assert reply.status == 200 and reply.body["why"]
    assert (await bench.answers("Hello")).startswith("Hello!")


@case("D44c", "an encoder is killed", "kill -9 while eight requests wait for it",
      "the other encoder answers all eight; text is served; degraded, then ok", kills=("encoder/0",))
async def encoder_killed(bench: Bench) -> None:
    async with held_by_one(bench) as worker, bench.healing():
        os.kill(worker["pid"], signal.SIGKILL)
        await degraded(bench)
    assert bench.daemon.worker("encoder/0")["restarts"] == worker["restarts"] + 1


@case("D44d", "a worker hangs", "SIGSTOP while eight requests wait for it",
      "noticed within fleet.stall_s, then as D44c", kills=("encoder/0",))
async def encoder_stopped(bench: Bench) -> None:
    async with held_by_one(bench), bench.healing():
        await degraded(bench)
    assert re.search(r"silent for \d+ s, standing still", bench.daemon.worker("encoder/0")["last_error"])


@case("D44e", "the daemon is killed", "kill -9, then another start with the same socket",
      "all children are gone; the start is clean")
async def daemon_killed(bench: Bench) -> None:
    bench.ready_s = await asyncio.to_thread(killed_and_started, bench.folder / "killed", False)


@case("D44f", "everything is killed", "kill -9 of daemon, fork server and workers; then /dev/shm",
      "nothing is left there; the next start is clean")
async def all_killed(bench: Bench) -> None:
    bench.ready_s = await asyncio.to_thread(killed_and_started, bench.folder / "all killed", True)


def killed_and_started(folder: Path, everything: bool) -> float:
    """Seconds from the kill until the next daemon is READY."""
    folder.mkdir()
    before = set(os.listdir("/dev/shm"))
    with running(folder=folder, **LIGHT) as daemon:
        family = psutil.Process(daemon.ready().process.pid).children(recursive=True)
        assert len(family) >= 3         # the fork server, an encoder and a prefill-decode worker
        began = time.monotonic()
        for process in family if everything else ():
            process.kill()
        daemon.process.kill()
        daemon.process.wait()
        _, alive = psutil.wait_procs(family, timeout=SETTLE_S)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert set(os.listdir("/dev/shm")) <= before
    with running(folder=folder, **LIGHT) as daemon:
        daemon.ready()
        return time.monotonic() - began


@case("D44i", "no memory while encoding", "a large image; one encoder has no memory for it, then both",
      "the other encoder does it; 503 if neither can; small ones are right; the same processes go on")
async def no_memory(bench: Bench) -> None:
    picture = await asyncio.to_thread(pictures.circle, "blue", 4500)        # 142 MB while it is decoded
    large = [asking(picture + random.randbytes(8), COLOUR) for _ in range(3)]
    small = [asking(pictures.circle("red", 100) + random.randbytes(8), COLOUR) for _ in range(4)]
    with ExitStack() as limited:
        bench.daemon.ask("drain", worker="encoder/1")
        limited.enter_context(limited_memory(bench.daemon.worker("encoder/0")["pid"]))
        failed = bench.daemon.worker("encoder/0")["failed"]
        async with bench.frozen("encoder/0"):
            ask = asyncio.create_task(bench.post(large[0]))
            await bench.until(lambda s: s["workers"][0]["in_flight"] == 1)
            bench.daemon.ask("resume", worker="encoder/1")
        assert (await ask).said == "blue"
        assert bench.daemon.worker("encoder/0")["failed"] == failed + 1
        limited.enter_context(limited_memory(bench.daemon.worker("encoder/1")["pid"]))
        reply = await bench.post(large[1])
        assert (reply.status, reply.error["code"], reply.headers["Retry-After"]) == (503, "out_of_memory", "1")
        assert [reply.said for reply in await asyncio.gather(*map(bench.post, small))] == ["red"] * 4
    assert (await bench.post(large[2])).said == "blue"


@contextmanager
def limited_memory(pid: int) -> Iterator[None]:
    """Limit the process's memory: enough for small images, too little for a large one."""
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (psutil.Process(pid).memory_info().vms + (48 << 20), before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)


@case("D44k", "the kernel's OOM killer", "an encoder in a control group that has no memory left for a large image",
      "its end is told as what it is, then as D44c", kills=("encoder/0",))
async def out_of_memory(bench: Bench) -> None:
    colour = "green"
    body = asking(pictures.circle(colour, 1500) + random.randbytes(8), COLOUR)
    children = psutil.Process(bench.daemon.process.pid).children()
    server = next(child for child in children if "forkserver" in " ".join(child.cmdline()))
    with memory_group() as group:
        home = group_of(server.pid, group.root)
        group.add(server.pid)
        first = bench.daemon.worker("encoder/0")["pid"]
        os.kill(first, signal.SIGKILL)
        await bench.until(lambda s: s["state"] == "ready" and all(w["pid"] != first for w in s["workers"]), START_S)
        (home / "cgroup.procs").write_text(str(server.pid))
        victim = bench.daemon.worker("encoder/0")["pid"]
        assert group_of(victim, group.root) == group.folder
        bench.daemon.ask("drain", worker="encoder/1")
        group.leave_only(4 << 20)
        async with bench.healing():
            ask = asyncio.create_task(bench.post(body))
            await bench.until(lambda s: all(w["pid"] != victim for w in s["workers"]), START_S)
            bench.daemon.ask("resume", worker="encoder/1")
            assert (await ask).said == colour
        assert "out of memory" in bench.daemon.worker("encoder/0")["last_error"]


@case("D44z", "the same request id twice", "two at once with one X-Request-ID",
      "both 200, and separate; the id is only repeated")
async def same_id(bench: Bench) -> None:
    headers = {"X-Request-ID": "twice"}
    replies: list[Reply] = await asyncio.gather(*(
        bench.post(asking(pictures.circle(colour, 109), COLOUR), headers=headers) for colour in ("red", "blue", "red")))
    assert [reply.said for reply in replies] == ["red", "blue", "red"]
    assert {reply.id for reply in replies} == {"twice"} and len({reply.body["id"] for reply in replies}) == 3
