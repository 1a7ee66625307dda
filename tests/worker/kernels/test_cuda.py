"""The CUDA module without a GPU: the runtime's calls against a stub in C, names and errors against torch itself."""

import ctypes
import inspect
import os
import subprocess
from pathlib import Path

import pytest
import torch

from epdd.errors import DeviceError, HardwareError, OutOfMemory, WorkerFailed
from epdd.worker.kernels import cuda
from tests.worker.fake_cuda import FakeDevice


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    library = tmp_path_factory.mktemp("cudart") / "libcudart.so.13"
    source = Path(__file__).with_name("cudart_stub.c")
    subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return cuda.Runtime(str(library))


@pytest.fixture
def device(runtime):
    """A real Device but for its context."""
    made = object.__new__(cuda.Device)
    made._runtime = runtime
    return made


class OneStream:
    cuda_stream = 0x5eed


def test_memory_goes_from_its_owner_to_who_opens_it(device):
    address = device.allocate(100)
    handle = device.export(address)
    assert len(handle) == cuda.HANDLE_BYTES and handle[63] == 7
    assert device.open(handle) == address
    device.close(address)
    with pytest.raises(WorkerFailed, match=r"cudaIpcOpenMemHandle: invalid resource handle \(400\)"):
        device.open(bytes(64))
    with pytest.raises(WorkerFailed, match="cudaIpcGetMemHandle"):
        device.export(0xbad)
    with pytest.raises(WorkerFailed, match="cudaMalloc: no memory"):
        device.allocate(3 << 30)


def test_copies_by_address(device):
    source, target = ctypes.create_string_buffer(b"rows", 4), ctypes.create_string_buffer(4)
    device.copy(ctypes.addressof(target), ctypes.addressof(source), 4, OneStream)
    assert target.raw == b"rows"
    OneStream.cuda_stream, kept = 1, OneStream.cuda_stream
    with pytest.raises(DeviceError, match="cudaMemcpyAsync: some error"):
        device.copy(ctypes.addressof(target), ctypes.addressof(source), 4, OneStream)
    OneStream.cuda_stream = kept


def test_a_refused_call_leaves_no_error_for_torch_to_find(device, runtime):
    device.register(4096, 4096)
    with pytest.raises(WorkerFailed, match="cudaHostRegister"):
        device.register(4096, 5)
    assert runtime._library.cudaGetLastError() == 0


def test_what_an_error_means():
    assert cuda.fault(ValueError("CUDA error")) is None
    assert cuda.fault(RuntimeError("shapes do not match")) is None
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
                  RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
                  RuntimeError("CUDA error: out of memory")):
        assert isinstance(cuda.fault(error), OutOfMemory)
    for error in (torch.AcceleratorError("CUDA error: device-side assert triggered\nmore"),
                  RuntimeError("CUDA error: an illegal memory access was encountered"),
                  RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
                  DeviceError("gone")):
        assert isinstance(cuda.fault(error), DeviceError)
    assert cuda.fault(torch.AcceleratorError("CUDA error: x\nCUDA kernel errors might be")).message == "CUDA error: x"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_said_so(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    with pytest.raises(HardwareError, match="cuda:0 cannot be used"):
        cuda.Device("cuda:0")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ and os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_this_torch_has_the_names_that_are_called():
    for name in ("set_device", "synchronize", "mem_get_info", "memory_allocated", "max_memory_allocated",
                 "reset_peak_memory_stats", "set_per_process_memory_fraction", "empty_cache", "current_stream",
                 "stream", "graph_pool_handle", "graph", "CUDAGraph", "get_device_name"):
        assert hasattr(torch.cuda, name), name
    for owner, names in ((torch.cuda.Stream, ("wait_event", "wait_stream", "synchronize")),
                         (torch.cuda.Event, ("record", "query"))):
        assert all(hasattr(owner, name) for name in names)
    assert {"pool", "stream", "capture_error_mode"} <= inspect.signature(torch.cuda.graph.__init__).parameters.keys()
    assert {"device", "priority"} <= inspect.signature(torch.cuda.Stream.__new__).parameters.keys()


def test_the_fake_has_the_same_calls():
    public = {name: list(inspect.signature(value).parameters) for name, value in vars(cuda.Device).items()
              if callable(value) and not name.startswith("_")}
    for name, parameters in public.items():
        assert list(inspect.signature(getattr(FakeDevice, name)).parameters) == parameters, name
