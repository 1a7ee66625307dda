"""Log output in a thread of its own: in order, bounded, without waits."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from epdd import log


def test_in_order_and_whole() -> None:
    output, done = log.Output(), list[int]()
    for number in range(1000):
        output.later(lambda number=number: done.append(number))     # type: ignore[misc]
    assert output.close() and done == list(range(1000)) and output.dropped == 0


def test_what_does_not_fit_is_counted_and_said_once_it_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, int]] = []
    monkeypatch.setattr(logging.getLogger(log.__name__), "warning", lambda *words: said.append(words))
    output, stuck, begun = log.Output(), threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        stuck.wait()

    output.later(block)
    assert begun.wait(60)
    done: list[int] = []
    for number in range(log.LINES_MAX + 7):
        output.later(lambda: done.append(1))
    assert output.dropped == 7
    assert not output.close()           # no caller waits for it
    stuck.set()
    while not output.close():
        pass
    assert len(done) == log.LINES_MAX
    assert [count for _, count in said] == [7]


def test_a_write_that_fails_stops_nothing() -> None:
    output, done = log.Output(), list[int]()

    def fail() -> None:
        raise OSError("the reader has gone")

    output.later(fail)
    output.later(lambda: done.append(1))
    assert output.close() and done == [1]


def test_no_record_steers_a_terminal() -> None:
    record = logging.LogRecord("epdd.x", logging.INFO, "", 1, "a\x1b[2J\x07\nb\x9bc\r\u00e4", (), None)
    assert log._Formatter(journal=False).format(record).endswith(" a\\x1b[2J\\x07\\nb\\x9bc\\r\u00e4")
    assert log._Formatter(journal=True).format(record).startswith("<6>a\\x1b")


def test_a_descriptor_that_others_made_not_wait_loses_nothing() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    size, got = 1 << 20, bytearray()

    def take() -> None:
        while len(got) < size:
            got.extend(os.read(read, 1 << 16))

    output, reader = log.Output(), threading.Thread(target=take, daemon=True)
    output.later(lambda: log.write("x" * size, write))
    reader.start()
    reader.join(60)
    assert len(got) == size and output.dropped == 0
