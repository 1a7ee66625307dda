"""A worker that speaks wire without torch: an encoder writes a hash of the image, a PD worker reads it back.

Started by the real fork server in place of epdd.worker.bootstrap.  `WorkerSpec.model` holds its manners as
JSON: encode_s, token_s (seconds of work), bad_start (exit code at once), life_s (it dies so long after it was
ready), deadly (an image that begins so kills it), deadly_prompt (number of tokens whose reading kills it), hang (image
bytes on which it stops for ever), spin (image bytes over which it computes for spin_s, without a word), garble (image
bytes on which it breaks the wire format).
"""

import hashlib
import json
import os
import select
import signal
import socket
import sys
import time

from epdd.arena import Mapping
from epdd.wire import (Beat, Cancel, Cancelled, Done, Encode, Encoded, Failed, FrameBuffer, Loading,
                       Prefilled, Ready, Tokens, pack)
from epdd.worker import affinity


def fingerprint(data: bytes) -> int:
    """What an image becomes: a token id that only its own bytes give."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=3).digest(), "little")


class FakeWorker:
    def __init__(self, spec, sock, arena):
        self.spec, self.sock, self.arena = spec, sock, arena
        self.manners = json.loads(spec.model)
        self.frames, self.todo, self.steps = FrameBuffer(), [], 0

    def say(self, message):
        self.sock.sendall(pack(message))

    def serve(self):
        self.say(Loading("weights", 0.5))
        if code := self.manners.get("bad_start"):
            self.say(Failed("", "bad_model", "no weights here"))
            sys.exit(code)
        samples = ((100, 0.1), (200, 0.2)) if self.spec.role == "encoder" else ()
        self.say(Ready(affinity.bind(self.spec), "float32", kv_tokens=4096, context_max=2048, samples=samples))
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
                self.say(Beat(self.steps))
        sys.exit(3)

    def take(self, message, raw):
        if not isinstance(message, Cancel):
            self.todo.append([message, raw, 0])
            return
        for item in [item for item in self.todo if item[0].id == message.id]:
            self.todo.remove(item)
            self.say(Cancelled(message.id))

    def work(self):
        item = self.todo.pop(0)
        message, raw, step = item
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
        time.sleep(self.manners.get("encode_s", 0))
        if raw.startswith(b"broken"):
            self.say(Failed(message.id, "image_parse_error", "the image is damaged"))
            return
        if raw.startswith(b"no memory"):
            self.say(Failed(message.id, "out_of_memory", "there is no memory for this"))
            return
        self.arena.view(message.lease)[:4] = fingerprint(raw).to_bytes(4, "little")
        size = 5 if raw == b"lie" else message.lease.size // 2
        self.say(Encoded(message.id, message.rows, size, "bfloat16", self.manners.get("encode_s", 0.01)))

    def generate(self, message, raw, step):
        """First the fingerprints of the images in order, then the number of prompt tokens."""
        if step == 0:
            if len(raw) // 4 == self.manners.get("deadly_prompt"):
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen = [int.from_bytes(self.arena.view(span.lease)[:4], "little") for span in message.spans]
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
