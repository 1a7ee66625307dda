"""One worker's socket: a work ends once, by a valid answer, and one work's fault ends no other."""

import asyncio

import pytest

from epdd.errors import ProtocolError, WorkerLost
from epdd.fleet.channel import Channel
from epdd.wire import Done, Encode, Encoded, Generate, Lease, Prefilled, Sampling, Tokens, pack, socket_pair

ENCODE = Encode("x", Lease(0, 8), (1, 2, 2), 1, (28, 28))
GENERATE = Generate("x", (), Sampling(1))


async def connected():
    """A channel that reads, its reading task, and the worker's end."""
    ours, theirs = socket_pair()
    ours.setblocking(False)
    channel = Channel(ours)
    reading = asyncio.create_task(channel.read(lambda message: None))
    return channel, reading, theirs


@pytest.mark.parametrize("work, answer", [
    (ENCODE, Prefilled("x")), (ENCODE, Tokens("x", (1,))), (ENCODE, Done("x", "stop")),
    (GENERATE, Encoded("x", 1, 8, "float32", 0.1)), (GENERATE, Encoded("y", 1, 8, "float32", 0.1))])
async def test_an_answer_that_is_none_breaks_the_protocol_and_ends_no_work(work, answer):
    channel, reading, theirs = await connected()
    events, ended = [], []
    channel.start(work, b"", 1, 1.0, events.append).on_end(lambda: ended.append(True))
    theirs.sendall(pack(answer))
    with pytest.raises(ProtocolError):
        await reading
    assert events == [] and ended == []
    channel.fail(WorkerLost("gone"))
    assert len(events) == 1 and ended == [True]


async def test_a_sink_that_fails_keeps_no_work_from_its_end():
    channel, reading, theirs = await connected()
    ended, events = [], []
    channel.start(ENCODE, b"", 1, 1.0, lambda event: 1 / 0).on_end(lambda: ended.append("first"))
    second = Encode("y", ENCODE.lease, ENCODE.grid, ENCODE.rows, ENCODE.size)
    channel.start(second, b"", 1, 1.0, events.append).on_end(lambda: ended.append("second"))
    theirs.close()
    await reading
    channel.fail(WorkerLost("gone"))
    assert ended == ["first", "second"] and len(events) == 1
