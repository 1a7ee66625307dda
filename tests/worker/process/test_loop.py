from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from epdd import wire
from epdd.errors import DeviceError, MediaError, ProtocolError, WorkerFailed, from_wire
from epdd.worker.process import loop


class Echo:
    """A role whose step answers one request with as many tokens as its prompt has bytes."""

    def __init__(self, send: loop.Send) -> None:
        self.send, self.work, self.steps = send, list[tuple[str, int]](), 0

    @property
    def busy(self) -> bool:
        return bool(self.work)

    def submit(self, message: wire.ToWorker, raw: bytes) -> None:
        if not isinstance(message, wire.Generate):
            raise ProtocolError("not mine")
        self.work.append((message.id, len(raw)))

    def cancel(self, work_id: str) -> None:
        if any(name == work_id for name, _ in self.work):
            self.work = [item for item in self.work if item[0] != work_id]
            self.send(wire.Cancelled(work_id))

    def step(self) -> None:
        self.steps += 1
        work_id, length = self.work.pop(0)
        self.send(wire.Tokens(work_id, tuple(range(length))))
        self.send(wire.Done(work_id, "stop"))

    def heartbeat(self) -> wire.Heartbeat:
        return wire.Heartbeat(steps=self.steps)


class Served:
    """The daemon's end of a loop that runs in a thread."""

    def __init__(self, heartbeat_s: float = 60.0) -> None:
        self.socket, theirs = wire.socket_pair()
        self.socket.settimeout(60)
        connection = loop.DaemonConnection(theirs.detach())
        self.role = Echo(connection.send)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(connection, heartbeat_s), daemon=True)
        self.thread.start()
        self._data = b""

    def _run(self, connection: loop.DaemonConnection, heartbeat_s: float) -> None:
        try:
            loop.run(connection, self.role, heartbeat_s)
        except Exception as error:
            self.error = error

    def send(self, message: wire.ToWorker, raw: bytes = b"") -> None:
        self.socket.sendall(wire.pack(message, raw))

    def read(self) -> wire.FromWorker:
        while True:
            if len(self._data) >= wire.HEAD.size:
                header, raw = wire.lengths(self._data[:wire.HEAD.size])
                end = wire.HEAD.size + header + raw
                if len(self._data) >= end:
                    message = wire.from_worker(self._data[wire.HEAD.size:wire.HEAD.size + header])
                    self._data = self._data[end:]
                    return message
            self._data += self.socket.recv(1 << 20)


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.socket.close()
    one.thread.join(60)


def generate(name: str) -> wire.Generate:
    return wire.Generate(name, (), wire.Sampling(max_tokens=1))


def test_work_is_answered_in_order_after_a_first_beat(served: Served) -> None:
    assert served.read() == wire.Heartbeat(steps=0)
    served.send(generate("a"), b"xy")
    served.send(generate("b"), b"x")
    assert [served.read() for _ in range(4)] == [wire.Tokens("a", (0, 1)), wire.Done("a", "stop"),
                                                 wire.Tokens("b", (0,)), wire.Done("b", "stop")]


def test_cancel_of_the_unknown_is_ignored(served: Served) -> None:
    served.read()
    served.send(wire.Cancel("nobody"))
    served.socket.sendall(wire.pack(generate("a"), b"x") + wire.pack(wire.Cancel("a")))
    assert served.read() == wire.Cancelled("a")


def test_frames_may_come_in_pieces(served: Served) -> None:
    served.read()
    for byte in wire.pack(generate("a"), b"xyz"):
        served.socket.sendall(bytes([byte]))
    assert served.read() == wire.Tokens("a", (0, 1, 2))


def test_beats_come_while_idle_and_while_busy() -> None:
    served = Served(heartbeat_s=0.02)
    assert all(isinstance(served.read(), wire.Heartbeat) for _ in range(5))
    for i in range(200):
        served.send(generate(str(i)), b"x")
    seen = [served.read() for _ in range(402)]
    assert sum(isinstance(message, wire.Done) for message in seen) >= 190
    served.socket.close()
    served.thread.join(60)
    assert not served.thread.is_alive()


def test_a_daemon_that_does_not_read_blocks_no_step_until_much_has_piled_up(
        served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "OUT_BYTES_MAX", 1 << 20)
    served.read()
    served.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for i in range(30):
        served.send(generate(str(i)), bytes(20_000))        # each answer is 100 kB of JSON
    deadline = time.monotonic() + 5
    while served.role.steps < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert served.role.steps >= 8
    time.sleep(0.1)
    assert served.role.steps < 30
    seen = [served.read() for _ in range(60)]
    assert [m.id for m in seen if isinstance(m, wire.Done)] == [str(i) for i in range(30)]


def test_hang_up_ends_the_loop(served: Served) -> None:
    served.socket.close()
    served.thread.join(60)
    assert not served.thread.is_alive() and served.error is None


@pytest.mark.parametrize("frame", [b"\xff" * 64, wire.HEAD.pack(2, 0) + b"{}", wire.HEAD.pack(4, 0) + b"junk",
                                   wire.pack(wire.Encode("x", wire.Lease(0, 1), (1, 2, 2), 1, (28, 28)), b"x")])
def test_garbage_is_a_protocol_error(served: Served, frame: bytes) -> None:
    served.socket.sendall(frame)
    served.thread.join(60)
    assert isinstance(served.error, ProtocolError)


def test_failures_tell_our_own_words_and_hide_others() -> None:
    assert loop.failed("a", MediaError("too small", code="image_too_small")) == wire.Failed(
        "a", "image_too_small", "too small")
    assert {loop.failed("a", error).code for error in (MemoryError(), RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    ))} == {"out_of_memory"}
    assert loop.failed("a", WorkerFailed("rows")) == wire.Failed("a", "worker_failed", "rows")
    assert loop.failed("a", RuntimeError("/secret/path 0x7f00")) == wire.Failed(
        "a", "internal_error", "the worker failed on this request")
    torchs = RuntimeError("[enforce fail at alloc_cpu.cpp:9] . DefaultCPUAllocator: can't allocate memory: you tried")
    for error in (MemoryError(), torchs):
        assert loop.failed("a", error).code == "out_of_memory"
        assert from_wire("out_of_memory", "").status == 503
    with pytest.raises(DeviceError):
        loop.failed("a", DeviceError("CUDA error"))
    with pytest.raises(ProtocolError):
        loop.failed("a", ProtocolError("bug"))
