"""Rows through leases with the fake device, whose streams run as late as they may."""

import mmap
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epdd import arena, wire
from epdd.errors import WorkerFailed
from epdd.worker.gpu import transfer
from epdd.worker.gpu.transfer import Transfer
from tests.worker.fake_cuda import FakeDevice

SIZE = 64 * mmap.PAGESIZE
SHAPE = (2, 6, 8)               # planes, rows, hidden


@pytest.fixture(scope="module")
def host():
    return arena.Mapping(arena.create(SIZE), SIZE)


def rows(seed=0, shape=SHAPE, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair(host):
    """An encoder's and a prefill-decode worker's side, the encoder's pool open in both as arena 3."""
    encoder, pd = Transfer(FakeDevice(process=1), host), Transfer(FakeDevice("cuda:1", process=2), host)
    pool = encoder.create_pool(SIZE)
    assert pd.handle(wire.OpenArena(3, pool)) == wire.Opened(3)
    return encoder, pd


@pytest.mark.parametrize("number", [0, 3])
def test_rows_come_as_they_were_stored(host, number):
    encoder, pd = pair(host)
    lease, data = wire.Lease(4096, 4096, number), rows()
    assert encoder.store(data, lease) == data.nbytes
    encoder._device.synchronise()
    for low, high in ((0, 6), (2, 5), (5, 6)):
        fetched = pd.fetch(lease, SHAPE, torch.bfloat16, low, high)
        assert not pd._device.reached(fetched.arrived)
        pd._device.wait(fetched.arrived)
        assert torch.equal(fetched.planes, data[:, low:high])


def test_without_waiting_nothing_is_there(host):
    """The fake's purpose: an encoder that answers without a wait hands over old bytes."""
    encoder, pd = pair(host)
    lease = wire.Lease(0, 4096, 3)
    encoder.store(rows(1), lease)
    fetched = pd.fetch(lease, SHAPE, torch.bfloat16, 0, 6)
    pd._device.synchronise()
    assert not fetched.planes.any()


def test_leases_are_checked(host):
    encoder, pd = pair(host)
    for lease in (wire.Lease(-1, 8), wire.Lease(SIZE - 8, 16), wire.Lease(0, 8, 4), wire.Lease(SIZE, 8, 3)):
        with pytest.raises(WorkerFailed, match="outside|not open"):
            pd.check(lease)
    with pytest.raises(WorkerFailed, match="does not hold"):
        encoder.store(rows(), wire.Lease(0, 100))
    with pytest.raises(WorkerFailed, match="are not in a lease of 100 bytes"):
        pd.fetch(wire.Lease(0, 100), SHAPE, torch.bfloat16, 0, 6)
    with pytest.raises(WorkerFailed, match="are not in a lease"):
        pd.fetch(wire.Lease(0, 4096), SHAPE, torch.bfloat16, 3, 7)


def test_an_own_pool_cannot_be_opened_nor_a_bad_handle(host):
    encoder, pd = pair(host)
    pool = encoder.create_pool(4096)
    assert "201" in encoder.handle(wire.OpenArena(5, pool)).error
    assert "non-hexadecimal" in pd.handle(wire.OpenArena(5, wire.GpuPool("not hex", 8))).error
    assert "invalid" in pd.handle(wire.OpenArena(5, wire.GpuPool("00" * 10, 8))).error
    with pytest.raises(WorkerFailed, match="arena 5 is not open"):
        pd.check(wire.Lease(0, 8, 5))


def test_a_pool_that_cannot_be_made_is_none(host):
    device = FakeDevice()
    device.inject("export", WorkerFailed("cudaIpcGetMemHandle: operation not supported (801)"))
    assert Transfer(device, host).create_pool(4096) is None
    assert Transfer(FakeDevice(total=100), host).create_pool(4096) is None


def test_closing_waits_for_what_reads(host):
    encoder, pd = pair(host)
    lease, data = wire.Lease(0, 4096, 3), rows(2)
    encoder.store(data, lease)
    encoder._device.synchronise()
    fetched = pd.fetch(lease, SHAPE, torch.bfloat16, 0, 6)
    assert pd.handle(wire.CloseArena(3)) is None
    assert torch.equal(fetched.planes, data)
    with pytest.raises(WorkerFailed, match="arena 3 is not open"):
        pd.check(lease)
    pd.handle(wire.CloseArena(3))       # twice is harmless


def test_what_a_dead_owner_leaves_is_noise(host):
    pd = Transfer(FakeDevice(), host)
    read, write = os.pipe()
    stay, leave = os.pipe()
    child = os.fork()
    if child == 0:
        owner = Transfer(FakeDevice(), None)
        os.write(write, owner.create_pool(4096).handle.encode())
        os.read(stay, 1)
        os._exit(0)
    assert pd.handle(wire.OpenArena(1, wire.GpuPool(os.read(read, 200).decode(), 4096))) == wire.Opened(1)
    os.write(leave, b".")
    os.waitpid(child, 0)
    fetched = pd.fetch(wire.Lease(0, 4096, 1), SHAPE, torch.uint8, 0, 6)
    pd._device.synchronise()
    assert (fetched.planes == 0xA5).all()
    pd.handle(wire.CloseArena(1))


def test_the_arena_is_pinned_in_portions(host, monkeypatch):
    monkeypatch.setattr(transfer, "PORTION_BYTES", SIZE // 4)
    made = Transfer(FakeDevice(), host)
    assert made.idle() is None and not made.pinning
    made.handle(wire.OpenArena(0))
    said = []
    while made.pinning:
        said.append(made.idle())
    assert said == [None] * 4 + [wire.Opened(0)]
    base = made._arenas[0][0]
    assert made._device.registered == [(base + i * SIZE // 4, SIZE // 4) for i in range(4)]


def test_an_arena_that_cannot_be_pinned_is_used_as_it_is(host, monkeypatch):
    monkeypatch.setattr(transfer, "PORTION_BYTES", SIZE // 4)
    device = FakeDevice()
    device.inject("register", WorkerFailed("cudaHostRegister: no memory"))
    made = Transfer(device, host)
    made.handle(wire.OpenArena(0))
    assert made.idle() == wire.Opened(0, "cudaHostRegister: no memory") and not made.pinning
    made.store(rows(3), wire.Lease(0, 4096))
    device.synchronise()
    fetched = made.fetch(wire.Lease(0, 4096), SHAPE, torch.bfloat16, 0, 6)
    device.wait(fetched.arrived)
    assert torch.equal(fetched.planes, rows(3))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, SIZE - 400), st.integers(1, 6), st.integers(0, 5), st.sampled_from([512, 1024, 4096]))
def test_no_copy_crosses_a_portion(offset, count, low, portion):
    """A copy must lie in memory that was pinned as one."""
    host = arena.Mapping(arena.create(SIZE), SIZE)
    device = FakeDevice()
    made = Transfer(device, host)
    base, _ = made._arenas[0]
    before, transfer.PORTION_BYTES = transfer.PORTION_BYTES, portion
    copies = []
    copy = device.copy
    device.copy = lambda target, source, size, stream: (copies.append((target, source, size)),
                                                        copy(target, source, size, stream))
    try:
        lease, data = wire.Lease(offset, 400), rows(4, (2, 6, 16))
        made.store(data, lease)
        device.synchronise()
        high = min(6, low + count)
        fetched = made.fetch(lease, (2, 6, 16), torch.bfloat16, low, high)
        device.wait(fetched.arrived)
    finally:
        transfer.PORTION_BYTES = before
    assert torch.equal(fetched.planes, data[:, low:high])
    for ends in copies:
        for address in ends[:2]:
            if base <= address < base + SIZE:
                assert (address - base) // portion == (address + ends[2] - 1 - base) // portion
