"""Everything that crosses a process edge between daemon and worker.

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
HEADER_BYTES_MAX = 4 << 20    # a Generate with hundreds of spans, a large logit_bias and grammar stays far below
RAW_BYTES_MAX = 256 << 20     # an image file or a prompt of 64 million tokens
CONTENT_LETTERS = 40          # 160 bits: no two files share them by chance


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
    weights: str = ""               # what families.weights says of its files; empty: any
    eos_ids: tuple[int, ...] = ()   # tokens that end an answer; empty: those that the folder's settings name
    dtype: str = "auto"             # "auto" (best for this device and checkpoint), "float32", "bfloat16"
    arena_bytes: int = 0            # size of the whole arena
    arena_slice: tuple[int, int] = (0, 0)  # offset, bytes: the part this worker touches first
    huge_pages: bool = True         # for the arena, where the system allows them
    kv_tokens: int = 0              # PD: tokens of KV cache; 0: as many as kv_bytes hold
    kv_bytes: int = 0               # PD: bytes for the KV cache when kv_tokens is 0
    max_batched_tokens: int = 512         # PD: tokens a step may hold, prefill and decode together
    step_s: float = 0.0             # PD: seconds that a step with decoding sequences should take at most; 0: no limit
    max_sequences: int = 64             # PD: sequences that run at once
    max_model_len: int = 0            # tokens; 0: what the checkpoint says
    pool_bytes: int = 0             # encoder on a GPU: of its memory, for rows that PD workers read there
    gpu_bytes: int = 0              # of a GPU that it shares, for weights, activations, KV cache; 0: what is free
    peers: tuple[str, ...] = ()     # PD on a GPU: devices whose memory it can open, its own among them
    quantize: str = ""              # encoder: "int8" where that is faster and near enough; empty: never
    kv_dtype: str = "auto"          # PD on CPUs: "auto" (the weights'), "float32", "bfloat16"
    prefix_cache: bool = True       # PD: prompts that begin like earlier ones skip what was computed for those
    heartbeat_s: float = 1.0        # seconds between heartbeats of the working loop
    log_level: str = "info"
    emulated: EmulatedWorker | None = None  # how its time passes; None: a real worker

    @property
    def placement(self) -> tuple[str, tuple[int, ...], int | None, int]:
        """Where the worker runs: device, CPUs, NUMA node, threads.  A change needs a new process."""
        return self.device, self.cpus, self.numa_node, self.threads


# --- parts of messages


class Lease(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bytes of an arena."""

    offset: int
    size: int
    arena: int = 0                  # 0: in the host's memory; others: a pool in an encoder's GPU memory


class Span(msgspec.Struct, frozen=True):
    """One image in a prompt: rows [start, start + rows) of the token list are its placeholders."""

    start: int
    rows: int
    grid: tuple[int, int, int]      # t, h, w in patches, before merging
    lease: Lease                    # [planes, rows, hidden]: embeddings, then deepstack features
    dtype: str                      # of the lease: "float32" or "bfloat16"
    digest: str                     # `content_hash` of its file, that of what else changes its embedding, and the salt


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
    logprobs: int = -1              # -1: none; n >= 0: the chosen token's and the n best
    ignore_eos: bool = False
    grammar: str = ""               # that the answer must follow, in llguidance's Lark; empty: any text
    think_end_id: int = -1          # the grammar begins after this token; -1: at once
    think_start_id: int = -1        # but only if the answer begins with this one; -1: it begins inside its thinking
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()     # empty: all
    # The spellings of words that must not come, as an automaton: in state `from` this token leads to state `to`.  State
    # 0 is always one of the present ones; a step that leads to 0 completes a word.
    bad_words: tuple[tuple[int, int, int], ...] = ()


class GpuPool(msgspec.Struct, frozen=True):
    """Memory of an encoder's GPU that other processes can open, for as long as that encoder lives."""

    handle: str                     # cudaIpcMemHandle_t in hex
    bytes: int


class Binding(msgspec.Struct, frozen=True):
    """What the kernel really bound, read back by the worker."""

    cpus: tuple[int, ...]
    mem_nodes: tuple[int, ...]      # empty: not bound
    threads: int
    warning: str = ""               # what was denied, naming the missing capability


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural logarithms, floored at -9999 so that JSON can carry them."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Trial(msgspec.Struct, frozen=True):
    """How one way to compute embeddings did at an encoder's warm-up."""

    backend: str
    seconds: float = 0.0            # for the same part of the tower; 0: not measured
    note: str = ""                  # why it is not used; empty: it was only slower, or is used


# --- daemon to worker


class Encode(msgspec.Struct, tag="encode", frozen=True, omit_defaults=True):
    """Encode the image in raw into the lease; answered by Encoded, Failed or Cancelled."""

    id: str
    lease: Lease
    grid: tuple[int, int, int]      # what the daemon computed from the upright size
    rows: int
    size: tuple[int, int]           # width and height as stored, by the header: the decoder must find the same
    orientation: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1   # EXIF's: how its pixels are turned upright


class Generate(msgspec.Struct, tag="generate", frozen=True, omit_defaults=True):
    """Answer the prompt whose int32 ids are in raw: Prefilled, Tokens..., then Done, Failed or Cancelled."""

    id: str
    spans: tuple[Span, ...]
    sampling: Sampling
    salt: str = ""                  # of another salt nothing in the prefix cache is used
    tenant: str = ""                # whose it is: a worker's places are shared fairly between tenants


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Stop work `id`; always answered by the work's own last message (Cancelled if it was cut short)."""

    id: str


class OpenArena(msgspec.Struct, tag="open", frozen=True, omit_defaults=True):
    """To a worker on a GPU: leases in this arena may follow.  Answered by Opened.

    Arena 0 is mapped already; the message says that all its pages are there, so that they can be pinned where they are.
    """

    arena: int
    pool: GpuPool | None = None        # of another arena than 0


class CloseArena(msgspec.Struct, tag="close", frozen=True):
    """The pool is gone, with its encoder's process: what has not been read of it cannot be read.  No answer.

    Works that still need it end by Failed with WorkerLost's code.
    """

    arena: int


# --- worker to daemon


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """Progress before Ready."""

    stage: str                      # "import", "arena", "weights", "warm-up"
    done: float                     # 0..1 within the stage


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The worker takes work from now on."""

    binding: Binding
    dtype: str                      # of the weights
    kv_tokens: int = 0              # PD: capacity
    max_model_len: int = 0            # PD: longest prompt plus answer
    samples: tuple[tuple[int, float], ...] = ()  # encoder warm-up: (patches, seconds)
    backend: str = ""               # encoder: what computes its products
    trials: tuple[Trial, ...] = ()  # encoder: how the backends did, when they were measured
    parameters: int = 0
    pool: GpuPool | None = None        # encoder on a GPU
    abilities: tuple[str, ...] = ()  # torch's own word: "AVX512", "bfloat16", "AMX", or the GPU's name
    seconds: float = 0.0            # from spawn to ready
    arena_huge_bytes: int = 0       # of its slice of the arena, that lie in huge pages: read back
    warning: str = ""               # what makes it slower than it could be, and what helps


class Opened(msgspec.Struct, tag="opened", frozen=True, omit_defaults=True):
    """Whether an arena can be used: pinned if it is the host's (without that copies are slower), else opened."""

    arena: int
    error: str = ""                 # why not


class Encoded(msgspec.Struct, tag="encoded", frozen=True):
    """The lease's first `bytes` bytes hold [planes, rows, hidden] of `dtype`; the rest is not needed.

    On a GPU the writes are done, not only launched: so the reader needs no event of the writer's.
    """

    id: str
    rows: int
    bytes: int
    dtype: str
    seconds: float                  # decode, preprocess and encode


class Prefilled(msgspec.Struct, tag="prefilled", frozen=True):
    """No step will read this request's leases again."""

    id: str
    cached_tokens: int = 0          # of the prompt, that were not computed for it


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """New tokens, in order."""

    id: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Done(msgspec.Struct, tag="done", frozen=True):
    """The answer is whole."""

    id: str
    reason: str                     # "stop" (EOS, stop_token_ids, or the grammar is complete) or "length"
    stop_token: int | None = None


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Work `id` failed; with an empty id, the worker itself did and is about to exit."""

    id: str
    code: str
    message: str


class Cancelled(msgspec.Struct, tag="cancelled", frozen=True):
    """Work `id` was cut short; the worker touches none of its leases any more."""

    id: str


class Heartbeat(msgspec.Struct, tag="beat", frozen=True):
    """Sent by the working loop itself, so that a stuck loop falls silent."""

    steps: int                      # units of work done since start
    running: int = 0
    waiting: int = 0
    kv_used: int = 0                # tokens
    kv_cached: int = 0              # tokens that nobody uses, kept for prompts to come until their room is needed
    preempted: int = 0              # in all


ToWorker = Union[Encode, Generate, Cancel, OpenArena, CloseArena]
FromWorker = Union[Loading, Ready, Opened, Encoded, Prefilled, Tokens, Done, Failed, Cancelled, Heartbeat]

T = TypeVar("T")
_encoder = msgspec.json.Encoder()
_to_worker = msgspec.json.Decoder(ToWorker)
_from_worker = msgspec.json.Decoder(FromWorker)


def pack(message: ToWorker | FromWorker, raw: bytes | memoryview = b"") -> bytes:
    """One frame.  The raw part is copied: frames are small beside the work they ask for."""
    header = _encoder.encode(message)
    return b"".join((HEAD.pack(len(header), len(raw)), header, raw))


def lengths(head: bytes) -> tuple[int, int]:
    """Header and raw length of a frame.  Raises ProtocolError over the limits."""
    header, raw = HEAD.unpack(head)
    if header > HEADER_BYTES_MAX or raw > RAW_BYTES_MAX:
        raise ProtocolError(f"frame of {header} + {raw} bytes is over the limit")
    return header, raw


def to_worker(header: bytes) -> ToWorker:
    """Raises ProtocolError on anything but a known, well-typed message."""
    return _decode(_to_worker, header)


def from_worker(header: bytes) -> FromWorker:
    """Raises ProtocolError on anything but a known, well-typed message."""
    return _decode(_from_worker, header)


def _decode(decoder: msgspec.json.Decoder[T], header: bytes) -> T:
    try:
        return decoder.decode(header)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"bad frame: {error}") from None


class FrameBuffer(Generic[T]):
    """Cuts a byte stream into frames, (message, raw)."""

    def __init__(self, decode: Callable[[bytes], T]) -> None:
        """`decode`: to_worker at the worker's end, from_worker at the daemon's."""
        self._decode = decode
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[T, bytes]]:
        """The frames that `data` completes, to be taken to the end.  Raises ProtocolError at the first bad one."""
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
    """Of an image file, CONTENT_LETTERS in hex: with it begins the digest that names its embedding everywhere."""
    return hashlib.blake2b(data, digest_size=CONTENT_LETTERS // 2).hexdigest()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The daemon's and the worker's end; neither is inherited by an exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
