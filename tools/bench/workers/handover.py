"""Time from the encoder's last write of an embedding to a tensor in the prefill-decode process.

    python -m tools.bench.workers.handover --out DIR

Two real worker processes behind the fleet's own channels, the real arena and frames: the writer copies an embedding
into a lease, tells this process, which stands for the daemon, and that tells the reader, which makes a tensor of the
lease.  Beside it the same bytes by other methods, each from private memory to an array that the other process has read
once: memcpy inside one process as the limit, a new memfd, pickle through a socket.

The limit of a handover is the wake-up of a process that has slept as long as the write took.  It is measured beside it:
a byte through a pipe to a process on the other core.  A handover wakes two processes in turn.  In service neither
sleeps so long: `answering` measures the same while an answer is written, a token each 10 ms.

Then the cost of encoding into a lease against private memory, by a tower of Qwen3-VL-8B's width with few layers.
"""

import argparse
import asyncio
import itertools
import json
import mmap
import os
import pickle
import socket
import statistics
import struct
import tempfile
import time
from pathlib import Path

import numpy as np

from tools import random_model
import torch
import uvloop

from tools.bench.plots import Panel
from tools.bench.report import Report
from tools.bench.workers.handover_worker import REPORT, TOKEN

from epdd import arena, wire
from epdd.fleet.channel import Channel
from epdd.fleet.process import ForkServer
from epdd.worker.vision.encoder import Encoder

MIB = 1 << 20
SIZES = {"1 MiB": (MIB,), "64 MiB": (64 * MIB,), "510 MiB": (64 * MIB,) * 7 + (62 * MIB,)}     # by images
START_S = 120.0
TOKEN_S = 0.01          # seconds between an answer's tokens beside the handovers
# Qwen3-VL-8B's tower and embeddings, with few layers and a tiny language model.
TOWER = random_model.Shape(hidden=4096, layers=1, heads=32, kv_heads=8, inter=64, vocab=1024, head_dim=128,
                           vision_hidden=1152, vision_layers=4, vision_heads=16, vision_inter=4304)


# --- through the arena


class End:
    """A worker and its channel."""

    @classmethod
    async def start(cls, server, spec, fd):
        self = cls()
        ours, theirs = wire.socket_pair()
        self.process = await server.spawn(spec, theirs, fd)
        theirs.close()
        ready = asyncio.Event()
        self._channel = Channel(ours)
        self._reading = asyncio.create_task(self._channel.read(
            lambda message: ready.set() if isinstance(message, wire.Ready) else None))
        await asyncio.wait_for(ready.wait(), START_S)
        return self

    async def do(self, message):
        """Its answer."""
        last = asyncio.get_running_loop().create_future()
        self._channel.start(message, b"", 1, 60.0, last.set_result)
        return await last

    async def stop(self):
        self._channel.close()
        await self.process.wait()


async def handovers(folder, huge_pages, repeats, answering=False):
    """{size: what both ends measured of each request but the first}, and the arena's bytes in huge pages by role.

    `answering`: an answer is being written meanwhile, a token each TOKEN_S from the reader to this process.
    """
    size = -(-max(map(sum, SIZES.values())) // arena.HUGE) * arena.HUGE
    server, fd = ForkServer(["epdd.worker.preload", "tools.bench.workers.handover_worker"]), arena.create(size)
    ends, files = {}, {role: folder / f"{role} {huge_pages} {answering}" for role in ("encoder", "pd")}
    cpus = sorted(os.sched_getaffinity(0))
    for role, cpu, part in (("encoder", cpus[0], (0, size)), ("pd", cpus[-1], (0, 0))):     # bound apart, as placed
        spec = wire.WorkerSpec(f"{role}/0", role, "cpu", (cpu,), None, 1, str(files[role]), arena_bytes=size,
                               arena_slice=part, huge_pages=huge_pages, heartbeat_s=3600.0)
        ends[role] = await End.start(server, spec, fd)
    numbers = itertools.count()
    answered = asyncio.Event()
    answer = asyncio.create_task(write_answer(ends["pd"], answered)) if answering else None
    done = {name: [await hand_over(ends, SIZES[name], next(numbers)) for _ in range(repeats + 1)][1:]
            for name in SIZES}
    answered.set()
    if answer is not None:
        await answer
    nothing = wire.Lease(0, 0)
    await ends["encoder"].do(wire.Encode(REPORT, nothing, (1, 2, 2), 1, (28, 28)))
    await ends["pd"].do(wire.Generate(REPORT, (), wire.Sampling(max_tokens=1)))
    found = {role: json.loads(file.read_text()) for role, file in files.items()}
    for end in ends.values():
        await end.stop()
    server.stop()
    os.close(fd)
    rows = {name: [joined(found, number, len(SIZES[name])) for number in done[name]] for name in SIZES}
    return rows, {role: found[role]["huge_bytes"] for role in found}


async def write_answer(end, answered):
    """Keep both ends awake as in service, until the event."""
    for number in itertools.count():
        if answered.is_set():
            return
        await end.do(wire.Generate(f"{TOKEN}{number}", (), wire.Sampling(max_tokens=1)))
        await asyncio.sleep(TOKEN_S)


async def hand_over(ends, sizes, number):
    """One request with an image of each size; its number."""
    leases = [wire.Lease(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
    await asyncio.gather(*(ends["encoder"].do(wire.Encode(f"{number}/{i}", lease, (1, 2, 2), 1, (28, 28)))
                           for i, lease in enumerate(leases)))
    spans = tuple(wire.Span(i, 1, (1, 2, 2), lease, "bfloat16", "") for i, lease in enumerate(leases))
    await ends["pd"].do(wire.Generate(f"{number}/", spans, wire.Sampling(max_tokens=1)))
    return number


def joined(found, number, images):
    """The measurements of both ends for one request."""
    written = [found["encoder"]["works"][f"{number}/{i}"] for i in range(images)]
    reader = found["pd"]["works"][f"{number}/"]
    if reader["wrong"]:
        raise SystemExit("the reader found other bytes than were written")
    return {"write_s": sum(work["written"] - work["began"] for work in written),
            "handover_s": reader["usable"] - max(work["written"] for work in written),
            "writer_faults": sum(work["faults"] for work in written), "reader_faults": reader["faults"],
            "read_s": reader["read_s"], "read_faults": reader["read_faults"],
            "private_bytes": reader["private_bytes"]}


# --- by other methods


def by_memcpy(size, repeats):
    """Seconds to copy from warm memory to warm memory, and the copy read once."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    times = []
    for _ in range(repeats + 1):
        began = time.monotonic()
        target[:] = source
        times.append(time.monotonic() - began)
        target.view(np.uint64).sum()
    return times[1:]


def through(send, receive, size, repeats):
    """Seconds from private memory to an array in a forked process that has been read once, by `send` and `receive`."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        for _ in range(repeats + 1):
            receive(theirs, size).view(np.uint64).sum()
            theirs.sendall(struct.pack("d", time.monotonic()))
        os._exit(0)
    theirs.close()
    source, times = np.ones(size, np.uint8), []
    for _ in range(repeats + 1):
        began = time.monotonic()
        send(ours, source)
        times.append(struct.unpack("d", ours.recv(8, socket.MSG_WAITALL))[0] - began)
    ours.close()
    os.waitpid(child, 0)
    return times[1:]


def wakes(seconds, repeats):
    """Seconds from writing a byte to its reading by a process on another core that has slept for `seconds`."""
    cpus, times = os.sched_getaffinity(0), []
    (there, here), (answer, back) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.sched_setaffinity(0, {max(cpus)})
        os.close(here)
        while os.read(there, 1):
            os.write(back, struct.pack("d", time.monotonic()))
        os._exit(0)
    os.sched_setaffinity(0, {min(cpus)})
    for _ in range(repeats):
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            pass
        sent = time.monotonic()
        os.write(here, b"x")
        times.append(struct.unpack("d", os.read(answer, 8))[0] - sent)
    os.close(here)
    os.waitpid(child, 0)
    os.sched_setaffinity(0, cpus)
    for end in (there, answer, back):
        os.close(end)
    return times


def send_memfd(sock, source):
    fd = os.memfd_create("fresh")
    os.ftruncate(fd, source.nbytes)
    np.frombuffer(mmap.mmap(fd, source.nbytes), np.uint8)[:] = source
    socket.send_fds(sock, [b"x"], [fd])
    os.close(fd)


def receive_memfd(sock, size):
    fd = socket.recv_fds(sock, 1, 1)[1][0]
    found = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    os.close(fd)
    return found


def send_pickle(sock, source):
    data = pickle.dumps(source, pickle.HIGHEST_PROTOCOL)
    sock.sendall(struct.pack("Q", len(data)))
    sock.sendall(data)


def receive_pickle(sock, size):
    data = bytearray(struct.unpack("Q", sock.recv(8, socket.MSG_WAITALL))[0])
    view = memoryview(data)
    while view:
        view = view[sock.recv_into(view):]
    return pickle.loads(data)


# --- encoding into a lease


def encoding(folder, side, repeats):
    """CPU seconds to encode an image with `side` pixels a side, (into a lease, into private memory), in turns."""
    model = str(random_model.build(folder, TOWER))
    size = 256 << 20
    mapping = arena.Mapping(arena.create(size), size, True)
    mapping.reserve(0, size)
    spec = wire.WorkerSpec("encoder/0", "encoder", "cpu", (), None, 1, model, arena_bytes=size)
    encoder = Encoder(spec, mapping, lambda message: None)
    torch.set_num_threads(spec.threads)
    encoder.warm_up(lambda done: None)      # chooses the backend
    patches = side // random_model.PATCH
    grid, rows = (1, patches, patches), (patches // random_model.MERGE) ** 2
    message = wire.Encode("x", wire.Lease(0, size), grid, rows, (side, side))
    image = np.random.default_rng(0).integers(0, 256, (patches ** 2, 3 * random_model.PATCH ** 2), np.uint8)
    times = {True: [], False: []}
    for turn in range(2 * (repeats + 1)):
        began = time.process_time()
        planes = encoder.embed([image], [grid])
        if turn % 2:
            encoder._write(message, planes)
        times[bool(turn % 2)].append(time.process_time() - began)
    return times[True][1:], times[False][1:]


# --- the report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100, help="handovers of each size")
    parser.add_argument("--others", type=int, default=5, help="repeats of the other ways")
    parser.add_argument("--encodes", type=int, default=15, help="into a lease, and as many into private memory")
    parser.add_argument("--side", type=int, default=224, help="of the image that is encoded, in pixels")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = Report(args.out)
    with tempfile.TemporaryDirectory(prefix="epdd-handover-") as folder:
        found = {name: uvloop.run(handovers(Path(folder), huge, args.repeats, answering)) for name, huge, answering in (
            ("huge pages", True, False), ("4 KiB pages", False, False), ("huge pages, answering", True, True))}
        others = {size: {"memcpy": by_memcpy(sum(parts), args.others),
                         "fresh memfd": through(send_memfd, receive_memfd, sum(parts), args.others),
                         "pickle": through(send_pickle, receive_pickle, sum(parts), args.others)}
                  for size, parts in SIZES.items()}
        waking = {size: wakes(statistics.median(work["write_s"] for work in found["huge pages"][0][size]), args.repeats)
                  for size in SIZES}
        tell(report, found, others, waking)
        into = encoding(Path(folder) / "model", args.side, args.encodes)
    lease, private = map(statistics.median, into)
    report.say(f"encoding {args.side} x {args.side} pixels into a lease: {lease:.3f} s of CPU, into private "
               f"memory {private:.3f} s, ratio {lease / private:.3f} (target 1.03), medians of {len(into[0])}")
    report.close(arena={name: rows for name, (rows, _) in found.items()}, others=others, waking=waking,
                 encoding=into)


def tell(report, found, others, waking):
    rows = []
    for name, (sizes, huge) in found.items():
        for size, works in sizes.items():
            handover = sorted(work["handover_s"] for work in works)
            rows.append([f"{name}, {size}", 1e3 * statistics.median(handover), 1e3 * quantile(handover, 0.99),
                         1e3 * statistics.median(waking[size]), 1e3 * quantile(waking[size], 0.99),
                         1e3 * statistics.median(work["write_s"] for work in works),
                         1e3 * statistics.median(work["read_s"] for work in works),
                         max(work["reader_faults"] + work["read_faults"] for work in works),
                         max(work["writer_faults"] for work in works),
                         f"{max(work['private_bytes'] for work in works) / 1024:.0f}"])
        report.say(f"{name}: the kernel tells of {huge['encoder'] / MIB:.0f} MiB in huge pages in the writer, "
                   f"{huge['pd'] / MIB:.0f} in the reader")
    report.table("Through the arena: ms from the last write to a tensor, then to write it and to read it once", [
        "arena", "handover p50", "p99", "one wake-up p50", "p99", "write", "read", "reader's faults", "writer's",
        "reader's private KiB"], rows)
    table = []
    for size, ways in others.items():
        limit = statistics.median(ways["memcpy"])
        totals = {name: [work["write_s"] + work["handover_s"] + work["read_s"] for work in sizes[size]]
                  for name, (sizes, _) in found.items()} | ways
        table += [[f"{size}, {way}", 1e3 * statistics.median(times), statistics.median(times) / limit]
                  for way, times in totals.items()]
    report.table("All ways, ms from private memory to bytes that the other process has read; memcpy: the copy "
                 "alone", ["way", "ms", "to memcpy"], table)
    report.plot("handover", "From the last write to a tensor in the other process", "MiB", [Panel("p50 and p99", "ms", {
        f"{name}, {label}": [(sum(SIZES[size]) / MIB, 1e3 * quantile([work["handover_s"] for work in works], share))
                             for size, works in sizes.items()]
        for name, (sizes, _) in found.items() for label, share in (("p50", 0.5), ("p99", 0.99))})])


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main()
