"""A worker that speaks wire without torch: an encoder writes a hash of the image, a PD worker reads it back.

Started by the real fork server in place of epdd.worker.bootstrap.  `WorkerSpec.model` holds its behaviour as
JSON: encode_s, token_s (seconds of work), bad_start (exit code at once), life_s (it dies so long after it was
ready), deadly (an image that begins so kills it), deadly_prompt (number of tokens whose reading kills it), hang (image
bytes on which it stops for ever), spin (image bytes over which it computes for spin_s, without a word), garble (image
bytes on which it breaks the wire format), gate (a file without which prompts wait unread), pool (bytes of "GPU memory"
of each encoder, a memfd that its handle names), shut (it opens none), cuda_fault (image bytes on which a GPU fails).
"""

import hashlib
import json
import mmap
import os
import select
import signal
import socket
import sys
import time

from epdd.arena import Mapping
from epdd.errors import DeviceError
from epdd.wire import (Cancel, Cancelled, CloseArena, Done, Encode, Encoded, Failed, FrameBuffer, Generate, GpuPool,
                       Heartbeat, Loading, OpenArena, Opened, Prefilled, Ready, Tokens, pack, to_worker)
from epdd.worker.process import affinity


def fingerprint(data: bytes) -> int:
    """An image's embedding: a token id that is unique to its bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=3).digest(), "little")


class FakeWorker:
    def __init__(self, spec, sock, arena):
        self.spec, self.sock, self.arena = spec, sock, arena
        self.manners = json.loads(spec.model)
        self.frames, self.todo, self.steps = FrameBuffer(to_worker), [], 0
        self.pools = {}             # by arena; an encoder's own by None

    def say(self, message):
        self.sock.sendall(pack(message))

    def serve(self):
        self.say(Loading("weights", 0.5))
        if code := self.manners.get("bad_start"):
            self.say(Failed("", "bad_model", "no weights here"))
            sys.exit(code)
        samples = ((100, 0.1), (200, 0.2)) if self.spec.role == "encoder" else ()
        self.say(Ready(affinity.bind(self.spec), "float32", kv_tokens=4096, max_model_len=2048, samples=samples,
                       pool=self.pool()))
        life_s, ready_at = self.manners.get("life_s", 1e9), time.monotonic()
        while time.monotonic() < ready_at + life_s:
            readable, _, _ = select.select([self.sock], [], [], 0 if self.todo else min(0.2, life_s))
            if readable:
                data = self.sock.recv(1 << 20)
                if not data:
                    return
                for message, raw in self.frames.feed(data):
                    self.take(message, raw)
            elif self.todo:
                self.work()
            else:
                self.say(Heartbeat(self.steps))
        sys.exit(3)

    def pool(self):
        size = self.manners.get("pool", 0)
        if self.spec.role != "encoder" or self.spec.device == "cpu" or not size:
            return None
        fd = os.memfd_create("pool")
        os.ftruncate(fd, size)
        self.pools[None] = mmap.mmap(fd, size)
        return GpuPool(f"/proc/{os.getpid()}/fd/{fd}".encode().hex(), size)

    def open(self, message):
        if message.pool is not None and self.manners.get("shut"):
            return "no peer access"
        if message.pool is not None:
            with open(bytes.fromhex(message.pool.handle), "r+b") as file:
                self.pools[message.arena] = mmap.mmap(file.fileno(), message.pool.bytes)
        return ""

    def close(self, arena):
        for item in [item for item in self.todo if isinstance(item[0], Generate) and item[2] == 0]:
            if any(span.lease.arena == arena for span in item[0].spans):
                self.todo.remove(item)
                self.say(Failed(item[0].id, "worker_lost", "its images are gone"))
        self.pools.pop(arena, None)

    def view(self, lease):
        if lease.arena == 0:
            return self.arena.view(lease)
        memory = self.pools[None] if None in self.pools else self.pools[lease.arena]
        return memoryview(memory)[lease.offset:lease.offset + lease.size]

    def take(self, message, raw):
        if isinstance(message, OpenArena):
            self.say(Opened(message.arena, self.open(message)))
        elif isinstance(message, CloseArena):
            self.close(message.arena)
        elif not isinstance(message, Cancel):
            self.todo.append([message, raw, 0])
        else:
            for item in [item for item in self.todo if item[0].id == message.id]:
                self.todo.remove(item)
                self.say(Cancelled(message.id))

    def work(self):
        item = self.todo.pop(0)
        message, raw, step = item
        if isinstance(message, Generate) and step == 0 and not os.path.exists(self.manners.get("gate", "/")):
            self.todo.append(item)
            time.sleep(0.01)
            return
        self.steps += 1
        if isinstance(message, Encode):
            self.encode(message, raw)
        elif self.generate(message, raw, step):
            self.todo.append([message, raw, step + 1])

    def encode(self, message, raw):
        if (deadly := self.manners.get("deadly", "").encode()) and raw.startswith(deadly):
            os.kill(os.getpid(), signal.SIGKILL)
        if raw == self.manners.get("hang", "").encode() != b"":
            time.sleep(3600)
        if raw == self.manners.get("spin", "").encode() != b"":
            end = time.monotonic() + self.manners["spin_s"]
            while time.monotonic() < end:
                pass
        if raw == self.manners.get("garble", "").encode() != b"":
            self.sock.sendall(b"\x00\x00\x00\x01 this is no frame")
            time.sleep(3600)
        if raw == self.manners.get("cuda_fault", "").encode() != b"" and self.spec.device != "cpu":
            self.say(Failed("", DeviceError.code, "CUDA error: device-side assert triggered"))
            sys.exit(DeviceError.exit_code)
        time.sleep(self.manners.get("encode_s", 0))
        if raw.startswith(b"broken"):
            self.say(Failed(message.id, "image_parse_error", "the image is damaged"))
            return
        if raw.startswith(b"no memory"):
            self.say(Failed(message.id, "out_of_memory", "there is no memory for this"))
            return
        self.view(message.lease)[:4] = fingerprint(raw).to_bytes(4, "little")
        size = 5 if raw == b"lie" else message.lease.size // 2
        self.say(Encoded(message.id, message.rows, size, "bfloat16", self.manners.get("encode_s", 0.01)))

    def generate(self, message, raw, step):
        """First the fingerprints of the images in order, then the number of prompt tokens."""
        if step == 0:
            if len(raw) // 4 == self.manners.get("deadly_prompt"):
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen = [int.from_bytes(self.view(span.lease)[:4], "little") for span in message.spans]
            self.say(Prefilled(message.id))
            self.say(Tokens(message.id, (*self.seen, len(raw) // 4)))
        else:
            time.sleep(self.manners.get("token_s", 0))
            self.say(Tokens(message.id, (step,)))
        # With the last token, as the real one does: no answer is complete and open when the worker dies.
        if step + 1 < message.sampling.max_tokens:
            return True
        self.say(Done(message.id, "length"))
        return False


def main(spec, sock, arena):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    FakeWorker(spec, socket.socket(fileno=sock.detach()), Mapping(arena.detach(), spec.arena_bytes)).serve()
