"""A device of epdd.worker.kernels.cuda's kind without a GPU: host memory, and streams that run as late as they may.

A stream's work is done only when it is waited for: an answer that is sent without a wait carries wrong bytes, which the
test sees.  Memory that others may open is a memfd; its handle names it by process, so it cannot be opened once its
owner is gone, and later copies from it are noise.
"""

import ctypes
import mmap
import os
from contextlib import contextmanager

import torch

from epdd.errors import WorkerFailed
from epdd.worker.kernels.cuda import HANDLE_BYTES

NOISE = 0xA5


class Stream:
    def __init__(self):
        self.pending = []           # calls not made yet
        self.done = 0               # calls made

    def run(self, until=None):
        """Do its work, up to the `until`th call."""
        while self.pending and (until is None or self.done < until):
            self.pending.pop(0)()
            self.done += 1


class Event:
    def __init__(self, stream):
        self.stream, self.at = stream, stream.done + len(stream.pending)


class FakeDevice:
    """`process`: its pretended owner, which cannot open its own memory, as with CUDA."""

    def __init__(self, name="cuda:0", total=1 << 30, process=None):
        self.name, self.torch = name, torch.device("cpu")
        self.total = total
        self.process = process or os.getpid()
        self.emptied = 0            # calls of empty_cache
        self.peak = 0               # bytes, as told
        self.registered = []        # (address, bytes)
        self._taken = 0
        self._default = self._current = Stream()
        self._streams = [self._default]
        self._kept = []
        self._regions = {}          # address: (mapping, memfd), of our own and opened ones
        self._owners = {}           # address of an opened region: its owner's process
        self._faults = {}           # call: errors to raise

    def inject(self, call, *errors):
        """The next calls of this name raise these, one after the other; None: that one goes well."""
        self._faults.setdefault(call, []).extend(errors)

    def _maybe(self, call):
        error = self._faults[call].pop(0) if self._faults.get(call) else None
        if error is not None:
            raise error

    def enter(self):
        pass

    # --- memory

    def limit(self, size):
        self.allowed = size         # to tensors; what `allocate` gives is apart

    def pinned(self, tensor):
        return tensor.clone()

    def memory(self):
        return self.total - self._taken, self.total

    def held_bytes(self):
        return 0

    def peak_bytes(self):
        return self.peak

    def reset_peak(self):
        pass

    def empty_cache(self):
        self.emptied += 1

    def keep(self, tensor, stream):
        self._kept.append(tensor)

    # --- streams and events

    def stream(self, urgent=False):
        self._streams.append(Stream())
        return self._streams[-1]

    def current(self):
        return self._current

    @contextmanager
    def using(self, stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, stream=None):
        return Event(stream or self._current)

    def wait(self, event, stream=None):
        # torch's work on the CPU runs when it is called, so the work before it runs now.
        event.stream.run(event.at)

    def reached(self, event):
        return event.stream.done >= event.at

    def synchronise(self, stream=None):
        self._maybe("synchronise")
        for each in [stream] if stream else self._streams:
            each.run()
        if not any(each.pending for each in self._streams):
            self._kept.clear()

    # --- memory by address

    def copy(self, target, source, size, stream):
        self._maybe("copy")
        stream.pending.append(lambda: self._move(target, source, size))

    def _move(self, target, source, size):
        for address, owner in self._owners.items():
            if address <= source < address + len(self._regions[address][0]) and not os.path.exists(f"/proc/{owner}"):
                ctypes.memset(target, NOISE, size)
                return
        ctypes.memmove(target, source, size)

    def register(self, address, size):
        self._maybe("register")
        self.registered.append((address, size))

    def allocate(self, size):
        self._maybe("allocate")
        if size > self.total - self._taken:
            raise WorkerFailed("cudaMalloc: no memory")
        self._taken += size
        return self._map(os.memfd_create("fake-gpu"), size)

    def export(self, address):
        self._maybe("export")
        fd = self._regions[address][1]
        return f"{self.process} {os.getpid()} {fd}".encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle):
        self._maybe("open")
        if len(handle) != HANDLE_BYTES:
            raise WorkerFailed("cudaIpcOpenMemHandle: invalid argument (1)")
        owner, pid, fd = map(int, handle.rstrip(b"\0").split())
        if owner == self.process:
            raise WorkerFailed("cudaIpcOpenMemHandle: invalid device context (201)")
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError:
            raise WorkerFailed("cudaIpcOpenMemHandle: invalid resource handle (400)") from None
        address = self._map(opened, os.fstat(opened).st_size)
        self._owners[address] = pid
        return address

    def close(self, address):
        self._maybe("close")
        assert not any(stream.pending for stream in self._streams), "closed while something may read it"
        del self._owners[address]
        os.close(self._regions.pop(address)[1])

    def _map(self, fd, size):
        os.ftruncate(fd, max(size, os.fstat(fd).st_size))
        mapping = mmap.mmap(fd, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._regions[address] = mapping, fd
        return address

    # --- graphs

    def capture(self, run):
        run()
        result = run()

        def replay():
            for kept, made in zip(result, run()):
                kept.copy_(made)
        return replay, result
