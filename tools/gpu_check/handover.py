"""Embeddings from an encoder's process to another on the same GPU: by the host's pinned arena, and by CUDA IPC.

Run as a program it is the encoder's side: it reads a lease from a line, writes rows of one number there, and answers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from epdd import arena, wire
from epdd.worker.gpu.transfer import Transfer
from tools.gpu_check.parts import Check

LARGE, SMALL = (4, 2040, 4096), (4, 64, 1024)       # [planes, rows, hidden]: a picture of 1080p, a small one
ROUNDS, LEAK_ROUNDS = 12, 1000
ARENA_BYTES = 256 << 20
ARENA, POOL = 0, 1


class Encoder:
    """The other process."""

    def __init__(self, check: Check, fd: int) -> None:
        command = [sys.executable, "-m", __spec__.name, str(fd), *(["--cpu"] if check.cpu else [])]
        self._process = subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True)
        self.pid = self._process.pid
        self.pool = self._read()

    def store(self, shape: tuple[int, int, int], lease: wire.Lease, number: int) -> float:
        """Seconds of writing, until its stream is done."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps([shape, lease.offset, lease.size, lease.arena, number]) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the encoder's process ended")
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(20)


def measure(check: Check) -> None:
    device = check.device()
    fd = arena.create(ARENA_BYTES)
    mapping = arena.Mapping(fd, ARENA_BYTES)
    mapping.reserve(0, ARENA_BYTES)
    transfer = Transfer(device, mapping)
    encoder = Encoder(check, fd)
    try:
        began = time.perf_counter()
        transfer.handle(wire.OpenArena(ARENA))
        while transfer.pinning:
            opened = transfer.idle()
        check.row("arena pinned", ARENA_BYTES / 1e9 / (time.perf_counter() - began), "GB/s", opened.error if opened
                  else "")
        ways = {"host arena": ARENA}
        if encoder.pool:
            opened = transfer.handle(wire.OpenArena(POOL, wire.GpuPool(encoder.pool, ARENA_BYTES)))
            if opened and not opened.error:
                ways["CUDA IPC"] = POOL
            check.row("CUDA IPC opened", "no" if opened and opened.error else "yes", "", opened.error if opened else "")
        for name, where in ways.items():
            rates(check, device, transfer, encoder, name, where)
        leaks(check, device, transfer, encoder, list(ways.values()))
    finally:
        encoder.end()


def rates(check: Check, device: Any, transfer: Transfer, encoder: Encoder, name: str, where: int) -> None:
    shape = LARGE if not check.cpu else (4, 204, 256)
    lease = wire.Lease(0, shape[0] * shape[1] * shape[2] * 2, where)
    stored, fetched, whole = [], [], []
    for number in range(ROUNDS):
        began = time.perf_counter()
        stored.append(encoder.store(shape, lease, number))
        middle = time.perf_counter()
        planes = fetch(device, transfer, shape, lease)
        end = time.perf_counter()
        fetched.append(end - middle)
        whole.append(end - began)
        if not bool((planes == number).all()):
            raise SystemExit(f"{name}: other rows than were written")
    write, read, both = (statistics.median(times[2:]) for times in (stored, fetched, whole))
    check.row(name, 1e6 * both, "us", f"{lease.size / 2 ** 20:.0f} MiB from told to usable; written at "
              f"{lease.size / 1e9 / write:.1f}, read at {lease.size / 1e9 / read:.1f} GB/s")


def fetch(device: Any, transfer: Transfer, shape: tuple[int, int, int], lease: wire.Lease) -> torch.Tensor:
    fetched = transfer.fetch(lease, shape, torch.bfloat16, 0, shape[1])
    device.wait(fetched.arrived)
    device.synchronise()
    return fetched.planes


def leaks(check: Check, device: Any, transfer: Transfer, encoder: Encoder, ways: list[int]) -> None:
    """Memory that a thousand handovers lose, after a hundred for warm-up."""
    size = SMALL[0] * SMALL[1] * SMALL[2] * 2
    rounds = LEAK_ROUNDS if not check.cpu else 200
    before: tuple[int, int] = 0, 0
    for number in range(-100, rounds):
        if not number:
            before = taken(device, encoder.pid)
        lease = wire.Lease(size * (number % 7), size, ways[number % len(ways)])
        encoder.store(SMALL, lease, number % 200)
        if not bool((fetch(device, transfer, SMALL, lease) == number % 200).all()):
            raise SystemExit("other rows than were written")
    gpu, host = (b - a for a, b in zip(before, taken(device, encoder.pid)))
    check.row(f"{rounds} handovers", gpu / 2 ** 20, "MiB",
              f"more of GPU memory in use; {host / 2 ** 20:.1f} MiB of the processes' memory")


def taken(device: Any, pid: int) -> tuple[int, int]:
    """Bytes in use on the GPU, and resident in both processes."""
    free, total = device.memory()
    pages = sum(int(Path(f"/proc/{process}/statm").read_text().split()[1]) for process in (os.getpid(), pid))
    return total - free, pages * arena.PAGE


def main() -> None:
    check = Check("handover", Path(), Path(), "--cpu" in sys.argv)
    device = check.device()
    transfer = Transfer(device, arena.Mapping(int(sys.argv[1]), ARENA_BYTES))
    pool = transfer.create_pool(ARENA_BYTES)
    print(json.dumps(pool.handle if pool else ""), flush=True)
    rows: dict[tuple[int, ...], torch.Tensor] = {}
    for line in sys.stdin:
        shape, offset, size, where, number = json.loads(line)
        kept = rows.setdefault(tuple(shape), torch.empty(shape, dtype=torch.bfloat16, device=device.torch))
        kept.fill_(number)
        device.synchronise()
        began = time.perf_counter()
        transfer.store(kept, wire.Lease(offset, size, where))
        device.synchronise()
        print(json.dumps(time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    main()
