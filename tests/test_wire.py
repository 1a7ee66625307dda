"""Frames survive any cut of the stream; anything malformed ends the connection and nothing else."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd import wire
from epdd.errors import ProtocolError

MESSAGES = [
    (wire.Encode("e1", wire.Lease(4096, 100), (1, 4, 6), 6, (84, 56), 3), b"\xff\xd8 an image"),
    (wire.Generate("r1", (wire.Span(3, 6, (1, 4, 6), wire.Lease(0, 8), "float32", "ab"),),
                   wire.Sampling(5, temperature=0.5, logit_bias={7: -100.0}, stop_token_ids=(1, 2))), b"\x01\0\0\0"),
    (wire.Cancel("r1"), b""),
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.data())
def test_any_cut_gives_the_same_frames(messages, data):
    stream = b"".join(wire.pack(*message) for message in messages)
    buffer, got = wire.FrameBuffer(wire.to_worker), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        got += buffer.feed(stream[:cut])
        stream = stream[cut:]
    assert got == messages


@pytest.mark.parametrize("frame", [
    struct.pack("<II", wire.HEADER_BYTES_MAX + 1, 0),
    struct.pack("<II", 2, wire.RAW_BYTES_MAX + 1),
    struct.pack("<II", 2, 0) + b"{}",
    struct.pack("<II", 3, 0) + b"\x80\x04.",                            # a pickle is just bad JSON here
    struct.pack("<II", 18, 0) + b'{"type":"encode"}\n',                 # fields missing
    wire.pack(wire.Heartbeat(1)),                                            # the other direction's message
])
def test_malformed_frames_are_refused(frame):
    with pytest.raises(ProtocolError):
        list(wire.FrameBuffer(wire.to_worker).feed(frame))


def test_field_types_are_checked():
    good = msgspec.json.encode(MESSAGES[0][0])
    with pytest.raises(ProtocolError):
        wire.to_worker(good.replace(b"4096", b'"4096"'))


def test_worker_messages_round_trip_however_they_are_cut():
    sent = [wire.Ready(wire.Binding((0, 1), (0,), 2), "float32", samples=((64, 0.5),)), wire.Heartbeat(3, kv_used=9),
            wire.Tokens("r", (1, 2), (wire.TokenLogprob(-0.5, ((1, -0.5),)),)), wire.Done("r", "stop", 7),
            wire.Failed("", "bad_model", "no weights")]
    stream = b"".join(map(wire.pack, sent))
    for step in (1, 7, 64, len(stream)):
        buffer = wire.FrameBuffer(wire.from_worker)
        got = [frame for at in range(0, len(stream), step) for frame in buffer.feed(stream[at:at + step])]
        assert got == [(message, b"") for message in sent]


def test_frames_before_a_bad_one_are_taken():
    taken = []
    with pytest.raises(ProtocolError):
        for message, _ in wire.FrameBuffer(wire.from_worker).feed(wire.pack(wire.Heartbeat(1)) + b"\xff" * 8):
            taken.append(message)
    assert taken == [wire.Heartbeat(1)]


def test_a_lease_in_the_hosts_arena_says_nothing_of_arenas():
    """Most leases do, and their frames stay short."""
    frame = wire.pack(wire.Encode("e", wire.Lease(4096, 8), (1, 2, 2), 1, (28, 28)))
    assert b"arena" not in frame
    other = wire.Encode("e", wire.Lease(4096, 8, 3), (1, 2, 2), 1, (28, 28))
    assert list(wire.FrameBuffer(wire.to_worker).feed(wire.pack(other))) == [(other, b"")]


def test_pools_cross_as_text():
    pool = wire.GpuPool(bytes(range(64)).hex(), 1 << 30)
    for message in (wire.OpenArena(0), wire.OpenArena(7, pool), wire.CloseArena(7)):
        assert list(wire.FrameBuffer(wire.to_worker).feed(wire.pack(message))) == [(message, b"")]
    header, raw = wire.lengths(wire.pack(wire.Opened(7, "no peer access"))[:8])
    assert raw == 0
    assert wire.from_worker(wire.pack(wire.Opened(7, "no peer access"))[8:8 + header]) == wire.Opened(
        7, "no peer access")
