"""Every message between daemon and worker processes.

A frame is `u32 header length, u32 raw length` (little endian), a JSON header and raw bytes.  The header is one of
the tagged structs below, checked field by field when it is read; raw carries an image's bytes (Encode) or int32
token ids (Generate).  Embeddings never travel here: they lie in the arena, and a frame only names the bytes.
Nothing here is pickled but `WorkerSpec`, once, in multiprocess's own spawn message.
"""

from __future__ import annotations

import hashlib
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar, Union

import msgspec

from epdd.emulated_time import EmulatedWorker
from epdd.errors import ProtocolError

HEAD = struct.Struct("<II")
HEADER_BYTES_MAX = 4 << 20    # far more than a Generate with hundreds of spans, a large logit_bias and a grammar
RAW_BYTES_MAX = 256 << 20     # an image file or a prompt of 64 million tokens
CONTENT_LETTERS = 40          # 160 bits, so that two files do not share a hash by chance


@dataclass(frozen=True)
class WorkerSpec:
    """What one worker is and where it sits: made by placement, handed over at spawn."""

    name: str                       # "encoder/0", "pd/0"
    role: str                       # "encoder" or "pd"
    device: str                     # "cpu" or "cuda:N" (NVML index)
    cpus: tuple[int, ...]           # logical CPUs to bind to; empty: not bound
    numa_node: int | None           # memory is bound to it; None: not bound
    threads: int                    # OpenMP threads
    model: str                      # checkpoint folder
    weights: str = ""               # digest of its files by checkpoint.identity; empty: not checked
    eos_ids: tuple[int, ...] = ()   # tokens that end an answer; empty: those in the checkpoint's settings
    dtype: str = "auto"             # "auto" (best for this device and checkpoint), "float32", "bfloat16"
    arena_bytes: int = 0            # size of the whole arena
    arena_slice: tuple[int, int] = (0, 0)  # offset, bytes: the part that this worker allocates
    huge_pages: bool = True         # for the arena, if the system allows them
    kv_tokens: int = 0              # PD: tokens of KV cache; 0: as many as kv_bytes hold
    kv_bytes: int = 0               # PD: bytes for the KV cache when kv_tokens is 0
    max_batched_tokens: int = 512   # PD: tokens a step may hold, prefill and decode together
    step_s: float = 0.0             # PD: seconds that a step with decoding sequences should take at most; 0: no limit
    max_sequences: int = 64         # PD: sequences that run at once
    max_model_len: int = 0          # tokens; 0: what the checkpoint says
    pool_bytes: int = 0             # encoder on a GPU: bytes of its memory for embeddings that PD workers read there
    gpu_bytes: int = 0              # of a shared GPU, for weights, activations and KV cache; 0: all that is free
    peers: tuple[str, ...] = ()     # PD on a GPU: devices whose memory it can open, its own included
    quantize: str = ""              # encoder: "int8" if that is faster and exact enough; empty: never
    kv_dtype: str = "auto"          # PD on CPUs: "auto" (the weights'), "float32", "bfloat16"
    prefix_cache: bool = True       # PD: reuse KV cache of earlier prompts with the same beginning
    heartbeat_s: float = 1.0        # seconds between heartbeats of the working loop
    log_level: str = "info"
    emulated: EmulatedWorker | None = None  # its time model; None: a real worker

    @property
    def placement(self) -> tuple[str, tuple[int, ...], int | None, int]:
        """Where the worker runs: device, CPUs, NUMA node, threads.  A change needs a new process."""
        return self.device, self.cpus, self.numa_node, self.threads


# --- parts of messages


class Lease(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bytes of an arena."""

    offset: int
    size: int
    arena: int = 0                  # 0: host memory; others: a pool in the GPU memory of an encoder


Run = tuple[int, int]               # (offset, count) of image tokens that follow each other


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """One image in a prompt: where its rows go."""

    start: int                      # of its tokens in the token list; those of text among them are the model's
    rows: int                       # image tokens
    grid: tuple[int, int, int]      # t, h, w in patches, before merging
    lease: Lease                    # [planes, rows, hidden]: embeddings, then deepstack levels
    dtype: str                      # of the lease: "float32" or "bfloat16"
    digest: str                     # hash of the file, of everything else that changes its embedding, and the salt
    runs: tuple[Run, ...] = ()      # of image tokens, from `start`; (): one, of all rows

    @property
    def places(self) -> tuple[Run, ...]:
        """Its runs in the token list; the image's rows lie there one after another."""
        return tuple((self.start + offset, count) for offset, count in self.runs or ((0, self.rows),))

    @property
    def end(self) -> int:
        """The token after its last row."""
        offset, count = self.runs[-1] if self.runs else (0, self.rows)
        return self.start + offset + count


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen and when to stop.  Zero temperature is greedy."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0                  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    logprobs: int = -1              # -1: none; n >= 0: of the chosen token and of the n best
    ignore_eos: bool = False
    grammar: str = ""               # for structured output, in llguidance's Lark; empty: any text
    think_end_id: int = -1          # the grammar begins after this token; -1: at the first token
    think_start_id: int = -1        # but only if the answer begins with this one; -1: it begins inside its reasoning
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()     # empty: all
    # Banned words as an automaton of (state, token, next state).  State 0 is always active; a step to state 0 would
    # complete a banned word.
    bad_words: tuple[tuple[int, int, int], ...] = ()


class GpuPool(msgspec.Struct, frozen=True):
    """Memory on the GPU of an encoder that other processes can open while the encoder lives."""

    handle: str                     # cudaIpcMemHandle_t in hex
    bytes: int


class Binding(msgspec.Struct, frozen=True):
    """CPUs and memory that the kernel really bound, read back by the worker."""

    cpus: tuple[int, ...]
    mem_nodes: tuple[int, ...]      # empty: not bound
    threads: int
    warning: str = ""               # what was denied, and which capability is missing


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural logarithms, at least -9999, because JSON has no infinity."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Trial(msgspec.Struct, frozen=True):
    """Result of one backend at the warm-up of an encoder."""

    backend: str
    seconds: float = 0.0            # for the same part of the tower in each trial; 0: not measured
    note: str = ""                  # why it cannot be used; empty: it can, but may be slower


# --- daemon to worker


class Encode(msgspec.Struct, tag="encode", frozen=True, omit_defaults=True):
    """Encode the image file in raw into the lease.  Answered by Encoded, Failed or Cancelled."""

    id: str
    lease: Lease
    grid: tuple[int, int, int]      # computed by the daemon from the size after rotation
    rows: int
    size: tuple[int, int]           # width and height in the header; the decoder must find the same
    orientation: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1   # EXIF orientation


class Generate(msgspec.Struct, tag="generate", frozen=True, omit_defaults=True):
    """Answer the prompt with the int32 ids in raw: Prefilled, Tokens..., then Done, Failed or Cancelled."""

    id: str
    spans: tuple[Span, ...]
    sampling: Sampling
    salt: str = ""                  # prefix cache is shared only between equal salts
    tenant: str = ""                # a worker shares its sequences fairly between tenants


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Stop work `id`.  The answer is the last message of that work: Cancelled if it was stopped."""

    id: str


class OpenArena(msgspec.Struct, tag="open", frozen=True, omit_defaults=True):
    """To a worker on a GPU: leases in this arena may follow.  Answered by Opened.

    Arena 0 is already mapped; this message says that all its pages are allocated and can be pinned.
    """

    arena: int
    pool: GpuPool | None = None        # of another arena than 0


class CloseArena(msgspec.Struct, tag="close", frozen=True):
    """The pool is gone because the process of its encoder has ended.  No answer.

    Work that still needs the pool ends with Failed and the code of WorkerLost.
    """

    arena: int


# --- worker to daemon


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """Progress before Ready."""

    stage: str                      # "import", "arena", "weights", "warm-up"
    done: float                     # 0..1 within the stage


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The worker accepts work from now on."""

    binding: Binding
    dtype: str                      # of the weights
    kv_tokens: int = 0              # PD: capacity
    max_model_len: int = 0          # PD: longest prompt plus answer
    samples: tuple[tuple[int, float], ...] = ()  # encoder warm-up: (patches, seconds)
    backend: str = ""               # encoder: backend that it uses
    trials: tuple[Trial, ...] = ()  # encoder: results of the backends, if they were measured
    parameters: int = 0
    pool: GpuPool | None = None        # encoder on a GPU
    abilities: tuple[str, ...] = ()  # as torch reports them: "AVX512", "bfloat16", "AMX", or the name of the GPU
    seconds: float = 0.0            # from spawn to ready
    arena_huge_bytes: int = 0       # bytes of its slice of the arena in huge pages, read back
    warning: str = ""               # why it is slower than it could be, and what helps


class Opened(msgspec.Struct, tag="opened", frozen=True, omit_defaults=True):
    """Whether an arena can be used.  Host memory is pinned, as copies are slower without that; a pool is opened."""

    arena: int
    error: str = ""                 # why not


class Encoded(msgspec.Struct, tag="encoded", frozen=True):
    """The first `bytes` bytes of the lease hold [planes, rows, hidden] of `dtype`; the rest is free again.

    On a GPU the writes are done, not only launched, so the reader need not wait for an event of the writer.
    """

    id: str
    rows: int
    bytes: int
    dtype: str
    seconds: float                  # decode, preprocess and encode


class Prefilled(msgspec.Struct, tag="prefilled", frozen=True):
    """No step will read this request's leases again."""

    id: str
    cached_tokens: int = 0          # tokens of the prompt that came from the prefix cache


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """New tokens, in order."""

    id: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Done(msgspec.Struct, tag="done", frozen=True):
    """The answer is complete."""

    id: str
    reason: str                     # "stop" (EOS, stop_token_ids, or the grammar is complete) or "length"
    stop_token: int | None = None


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Work `id` failed.  An empty id means that the worker itself failed and will exit."""

    id: str
    code: str
    message: str


class Cancelled(msgspec.Struct, tag="cancelled", frozen=True):
    """Work `id` was stopped; the worker does not touch its leases any more."""

    id: str


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True):
    """Sent by the working loop itself, so a stuck loop sends none."""

    steps: int                      # units of work done since start
    running: int = 0
    waiting: int = 0
    kv_used: int = 0                # tokens
    kv_cached: int = 0              # tokens kept for later prompts, until their blocks are needed
    preempted: int = 0              # since start


ToWorker = Union[Encode, Generate, Cancel, OpenArena, CloseArena]
FromWorker = Union[Loading, Ready, Opened, Encoded, Prefilled, Tokens, Done, Failed, Cancelled, Heartbeat]

T = TypeVar("T")
_encoder = msgspec.json.Encoder()
_to_worker = msgspec.json.Decoder(ToWorker)
_from_worker = msgspec.json.Decoder(FromWorker)


def pack(message: ToWorker | FromWorker, raw: bytes | memoryview = b"") -> bytes:
    """One frame.  The raw part is copied, which takes little time compared with the work."""
    header = _encoder.encode(message)
    return b"".join((HEAD.pack(len(header), len(raw)), header, raw))


def lengths(head: bytes) -> tuple[int, int]:
    """Header and raw length of a frame.  Raises ProtocolError over the limits."""
    header, raw = HEAD.unpack(head)
    if header > HEADER_BYTES_MAX or raw > RAW_BYTES_MAX:
        raise ProtocolError(f"frame of {header} + {raw} bytes is over the limit")
    return header, raw


def to_worker(header: bytes) -> ToWorker:
    """The message.  Raises ProtocolError unless it is known and all its fields have the right types."""
    return _decode(_to_worker, header)


def from_worker(header: bytes) -> FromWorker:
    """The message.  Raises ProtocolError unless it is known and all its fields have the right types."""
    return _decode(_from_worker, header)


def _decode(decoder: msgspec.json.Decoder[T], header: bytes) -> T:
    try:
        return decoder.decode(header)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"bad frame: {error}") from None


class FrameBuffer(Generic[T]):
    """Splits a byte stream into frames, (message, raw)."""

    def __init__(self, decode: Callable[[bytes], T]) -> None:
        """`decode`: to_worker in a worker, from_worker in the daemon."""
        self._decode = decode
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[T, bytes]]:
        """Frames completed by `data`; the iterator must be exhausted.  Raises ProtocolError at the first bad frame."""
        self._data += data
        at = 0
        while len(self._data) - at >= HEAD.size:
            header, raw = lengths(bytes(self._data[at:at + HEAD.size]))
            end = at + HEAD.size + header + raw
            if len(self._data) < end:
                break
            body = at + HEAD.size
            yield self._decode(bytes(self._data[body:body + header])), bytes(self._data[body + header:end])
            at = end
        del self._data[:at]


def content_hash(data: bytes) -> str:
    """Hash of an image file, CONTENT_LETTERS in hex.  The digest that names its embedding begins with it."""
    return hashlib.blake2b(data, digest_size=CONTENT_LETTERS // 2).hexdigest()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The daemon's end and the worker's end; neither survives an exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
