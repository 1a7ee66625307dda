"""CUDA as workers use it; no other file calls it.

torch has public names for most of it.  For memory that another process may open, and for copies by address, the CUDA
runtime itself is called, in the very library that torch has loaded: its caching allocator hands out parts of larger
blocks, with expandable segments blocks that no process can open, and its own sharing of tensors counts references in
named files that a killed process leaves behind.

An error of CUDA is sticky: all later calls of the process fail as well.  So `fault` makes a DeviceError of every one
but memory that ran out, and a worker that has one ends.  Calls that are refused without harm (`register`, `allocate`,
`export`, `open`) raise WorkerFailed: their callers have another way.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from epdd.errors import DeviceError, EpddError, HardwareError, OutOfMemory, WorkerFailed

HANDLE_BYTES = 64               # CUDA_IPC_HANDLE_SIZE
BLOCK_BYTES = 2 << 20           # whole blocks of this size are shared, whatever else lies in them

_MEMCPY_DEFAULT = 4             # cudaMemcpyDefault: where the addresses lie says which way
_LAZY_PEER_ACCESS = 1           # cudaIpcMemLazyEnablePeerAccess, the only flag there is
_MEMORY_ALLOCATION = 2          # cudaErrorMemoryAllocation

# Messages of torch for faults that have no class of their own.
_NO_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
_BROKEN = ("CUDA error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "CUDA driver error")

T = TypeVar("T")


def fault(error: BaseException) -> EpddError | None:
    """OutOfMemory or DeviceError where `error` came from a device, else None."""
    if isinstance(error, (DeviceError, OutOfMemory)):
        return error
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in _NO_MEMORY):
        return OutOfMemory("the GPU has no memory for this")
    if isinstance(error, torch.AcceleratorError) or isinstance(error, RuntimeError) and any(
            words in text for words in _BROKEN):
        return DeviceError((text.splitlines() or [type(error).__name__])[0])
    return None


def card(name: str) -> str:
    """The product name of "cuda:N"."""
    return str(torch.cuda.get_device_name(name))


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t: passed by value."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class Runtime:
    """The few calls of the CUDA runtime that torch has no public name for."""

    def __init__(self, library: str) -> None:
        """Raises OSError, AttributeError."""
        self._library = ctypes.CDLL(library)
        address, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        for name, arguments in (
                ("cudaMalloc", [ctypes.POINTER(address), size]), ("cudaFree", [address]),
                ("cudaIpcGetMemHandle", [ctypes.POINTER(_Handle), address]),
                ("cudaIpcOpenMemHandle", [ctypes.POINTER(address), _Handle, flags]),
                ("cudaIpcCloseMemHandle", [address]), ("cudaHostRegister", [address, size, flags]),
                ("cudaMemcpyAsync", [address, address, size, ctypes.c_int, address]), ("cudaGetLastError", [])):
            getattr(self._library, name).argtypes = arguments
            getattr(self._library, name).restype = ctypes.c_int
        self._library.cudaGetErrorString.argtypes = [ctypes.c_int]
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Raises OutOfMemory, WorkerFailed with the runtime's message."""
        code = getattr(self._library, name)(*arguments)
        if code == 0:
            return
        # It would be reported once more by torch, after its next kernel.
        self._library.cudaGetLastError()
        if code == _MEMORY_ALLOCATION:
            raise OutOfMemory("the GPU has no memory for this")
        words = self._library.cudaGetErrorString(code) or b""
        raise WorkerFailed(f"{name}: {words.decode(errors='replace')} ({code})")


def loaded_runtime() -> Runtime:
    """The runtime that torch has loaded.  Raises HardwareError where there is none to be found."""
    with open("/proc/self/maps") as file:
        paths = {line.split()[-1] for line in file if "/libcudart" in line}
    major = str(torch.version.cuda or "").partition(".")[0]
    for path in [*sorted(paths), f"libcudart.so.{major}"]:
        try:
            return Runtime(path)
        except (OSError, AttributeError):
            continue
    raise HardwareError("torch's CUDA runtime is not to be found as a library of its own")


class Device:
    """The one GPU of this process.  CUDA's choice is by thread: all but the one that makes this `enter` first."""

    def __init__(self, name: str) -> None:
        """Selects "cuda:N", N as NVML counts, and starts its context.  Raises HardwareError."""
        # Workers see all GPUs, in the order of the bus, which is NVML's.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self.name = name
        self.torch = torch.device(name)
        if not torch.backends.cuda.is_built():
            raise HardwareError(f"{name} cannot be used: this torch is built without CUDA")
        try:
            torch.cuda.set_device(self.torch)
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise HardwareError(f"{name} cannot be used: {(str(error).splitlines() or [''])[0]}") from None
        self._runtime = loaded_runtime()
        # Kernels of a graph keep the priority of the stream they were captured on.
        self._capture_stream = self.stream(urgent=True)
        self._graphs = torch.cuda.graph_pool_handle()

    def enter(self) -> None:
        """This thread uses the GPU as well."""
        torch.cuda.set_device(self.torch)

    # --- memory

    def limit(self, size: int) -> None:
        """Let all tensors of this process together take at most `size` bytes."""
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / self.memory()[1]), self.torch)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory that copies to the GPU need not wait for."""
        return tensor.pin_memory()

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all, of the whole GPU."""
        free, total = torch.cuda.mem_get_info(self.torch)
        return int(free), int(total)

    def held_bytes(self) -> int:
        """What tensors of this process take now."""
        return int(torch.cuda.memory_allocated(self.torch))

    def peak_bytes(self) -> int:
        """The most that tensors of this process have taken since `reset_peak`."""
        return int(torch.cuda.max_memory_allocated(self.torch))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch)

    def empty_cache(self) -> None:
        """Give back what torch keeps of freed memory."""
        torch.cuda.empty_cache()

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """`stream`, not the one it was made on, uses the tensor: its memory is reused only after that."""
        tensor.record_stream(stream)

    # --- streams and events

    def stream(self, urgent: bool = False) -> Any:
        """A stream; kernels of an urgent one go first, among those of this process."""
        return torch.cuda.Stream(self.torch, priority=-1 if urgent else 0)

    def current(self) -> Any:
        return torch.cuda.current_stream()

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """`with`: what is launched goes to `stream`."""
        return torch.cuda.stream(stream)  # type: ignore[no-any-return]

    def record(self, stream: Any = None) -> Any:
        """An event after all that `stream` (none: the current one) has been given."""
        event = torch.cuda.Event()
        event.record(stream or self.current())
        return event

    def wait(self, event: Any, stream: Any = None) -> None:
        """`stream` (none: the current one) goes on only after the event; this thread does not wait."""
        (stream or self.current()).wait_event(event)

    def reached(self, event: Any) -> bool:
        return bool(event.query())

    def synchronise(self, stream: Any = None) -> None:
        """Wait here until `stream`, or everything, is done."""
        if stream is None:
            torch.cuda.synchronize()
        else:
            stream.synchronize()

    # --- memory by address

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        """Copy bytes between any two addresses that this process can use, in `stream`'s turn.

        From or to host memory that is not registered it may wait for the copy.  Raises DeviceError.
        """
        try:
            self._runtime.call("cudaMemcpyAsync", target, source, size, _MEMCPY_DEFAULT, stream.cuda_stream)
        except EpddError as error:
            raise DeviceError(error.message) from None

    def register(self, address: int, size: int) -> None:
        """Pin host memory, for the life of the process: copies then overlap other work.  Raises WorkerFailed."""
        self._refusable("cudaHostRegister", address, size, 0)

    def allocate(self, size: int) -> int:
        """Address of memory of its own, for the life of the process, that can be exported.  Raises WorkerFailed."""
        address = ctypes.c_void_p()
        self._refusable("cudaMalloc", ctypes.byref(address), -(-size // BLOCK_BYTES) * BLOCK_BYTES)
        return address.value or 0

    def export(self, address: int) -> bytes:
        """A handle by which other processes can open what `allocate` gave.  Raises WorkerFailed."""
        handle = _Handle()
        self._refusable("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's memory, of this GPU or a peer.  Raises WorkerFailed.

        It is mapped for this process's own GPU, so that no context is made on the other one.
        """
        address = ctypes.c_void_p()
        self._refusable("cudaIpcOpenMemHandle", ctypes.byref(address), _Handle.from_buffer_copy(handle),
                        _LAZY_PEER_ACCESS)
        return address.value or 0

    def close(self, address: int) -> None:
        """Unmap what `open` gave; nothing may use it any more.  Raises WorkerFailed."""
        self._refusable("cudaIpcCloseMemHandle", address)

    def _refusable(self, name: str, *arguments: Any) -> None:
        try:
            self._runtime.call(name, *arguments)
        except OutOfMemory:
            raise WorkerFailed(f"{name}: no memory") from None

    # --- graphs

    def capture(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """`run`'s kernels as one launch, and what it returns, which each launch overwrites.

        Launches use the current stream.  All graphs share memory: what one returns holds until the next launch of
        any.  `run` is called twice, and must use memory that stays where it is for what it reads.
        """
        stream = self._capture_stream
        stream.wait_stream(self.current())
        with torch.cuda.stream(stream):
            run()       # libraries set up on first use what cannot be captured
        self.current().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graphs, stream=stream, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result
