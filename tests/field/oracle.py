"""Checks after every case."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.field.cases import pictures
from tests.field.bench import ANSWER_BYTES_MAX, BASE64, GAP_S, LEAKS, LOG_BYTES_MAX, SETTLE_S, Bench, Reply
from tests.field.table import Case

NEIGHBOUR = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 80,
             "ignore_eos": True, "stream": True}
GREETING = "Hello! I can name colours and shapes"
CASE_S = 400.0              # a hang
RESIDENT_SHARE = 0.05       # allowed growth of a process over the repetitions
RESIDENT_FLOOR = 4 << 20    # bytes of allocator noise in a daemon of 60 MB


def kept_waiting(*pids: int) -> float:
    """Seconds in which runnable threads of these processes had no CPU, since their start."""
    waited = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):         # a thread that has just ended
                waited += int(path.read_text().split()[1])
    return waited / 1e9


class Neighbour:
    """Another client's streams, one after the other, while the case runs.

    A pause counts without the time in which the processes that make the stream had no CPU.
    """

    def __init__(self, bench: Bench, expected: str) -> None:
        self._bench, self._expected = bench, expected
        self._over = asyncio.Event()
        self.begun = asyncio.Event()
        self._gap = 0.0

    async def run(self) -> None:
        while not self._over.is_set():
            text = await self._one()
            assert text == self._expected, f"a stream beside the case said {text!r}"

    async def _one(self) -> str:
        lines: list[bytes] = []
        pids = os.getpid(), self._bench.daemon.process.pid, self._bench.worker("pd/0")["pid"]
        last = waited = 0.0
        async with self._bench.http.post(self._bench.daemon.url("/v1/chat/completions"), json=NEIGHBOUR) as answer:
            async for line in answer.content:
                now, waits = time.monotonic(), kept_waiting(*pids)
                # Its first token waits for earlier requests.
                self._gap = max(self._gap, now - last - max(0.0, waits - waited) if last else 0.0)
                last, waited = now, waits
                lines.append(line)
                self.begun.set()
        return Reply(answer.status, {}, b"".join(lines).decode(), 0).said

    async def end(self, task: asyncio.Task[None]) -> None:
        self._over.set()
        await task
        assert self._gap < GAP_S, f"a stream beside the case paused for {self._gap:.1f} s"


async def expected_text(bench: Bench) -> str:
    return (await bench.post(NEIGHBOUR)).said


async def at_rest(bench: Bench) -> dict[str, Any]:
    """The numbers that must be back at their start, when nothing runs."""
    def idle(status: dict[str, Any]) -> bool:
        return (status["requests"]["running"] == 0 and status["router"]["queue_jobs"] == 0
                and status["arena"]["waiting"] == 0 and status["arena"]["pinned_bytes"] == 0
                and all(not w["in_flight"] and not w["running"] and not w["waiting"] and not w["kv_used"]
                        for w in status["workers"]))
    status = await bench.until(idle, SETTLE_S)
    daemon = psutil.Process(bench.daemon.process.pid)
    children = daemon.children(recursive=True)
    # The first request with a grammar starts it, with two pipes.
    checkers = sum("epdd.grammar" in " ".join(child.cmdline()) for child in children)
    return {"i_cpu": status["router"]["i_cpu"], "held": await held(bench),
            "fds": daemon.num_fds() - 2 * checkers, "children": len(children) - checkers,
            "worker_fds": {w["name"]: len(os.listdir(f"/proc/{w['pid']}/fd")) for w in status["workers"]},
            "pids": {w["name"]: w["pid"] for w in status["workers"]}}


async def held(bench: Bench) -> float:
    """Bytes of bodies and image files in the daemon's memory."""
    text = (await bench.get("/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("epdd_held_bytes"))


async def settled(bench: Bench, case: Case, before: dict[str, Any]) -> dict[str, Any]:
    """Everything is back at its start within SETTLE_S, except pids of killed workers; returns the numbers."""
    if case.kills:
        await bench.ready()
    end = time.monotonic() + SETTLE_S
    while True:
        after = await at_rest(bench)
        changed = {name for name, pid in after["pids"].items() if pid != before["pids"].get(name)}
        # Fewer descriptors: a connection of the case before was still closing when they were counted.
        left = {key: (before[key], value) for key, value in after.items()
                if value != before[key] and key != "pids" and not (key == "fds" and value < before[key])}
        if not left or time.monotonic() > end:
            break
        await asyncio.sleep(0.05)       # a connection may still be closing
    assert not left, f"before and after: {left}"
    assert changed <= set(case.kills), f"{changed} were replaced"
    return after


async def served(bench: Bench, sees: bool) -> None:
    """The daemon still answers, and rightly."""
    assert (await bench.answers("Hello")).startswith(GREETING)
    if sees:
        assert await bench.answers(pictures.circle("red", 64), "What colour is the circle?") == "red"


def errors_clean(bench: Bench) -> None:
    """No answer reveals internals or repeats the request."""
    for reply in bench.errors:
        assert reply.headers["Content-Type"].startswith("application/json")
        error = reply.error
        assert set(error) == {"message", "type", "param", "code"}, reply.text
        assert isinstance(error["message"], str) and (error["code"] is None or isinstance(error["code"], str))
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "server_error" if reply.status >= 500 else "invalid_request_error"
        assert error["type"] == kinds.get(reply.status, kind), reply.text
        assert len(reply.text) < ANSWER_BYTES_MAX and not LEAKS.search(reply.text), reply.text[:1000]


def log_clean(bench: Bench, text: str) -> None:
    """The daemon's own faults are logged with their request; no log line is long or holds an image."""
    for line in text.splitlines():
        assert len(line) < LOG_BYTES_MAX and not BASE64.search(line), line[:500]
    assert "Traceback" not in text, text[-4000:]
    for reply in bench.errors:
        # Clients' faults and overload are counted and not logged.
        if reply.status >= 500 and reply.error["code"] not in ("no_worker", "arena_full", "unavailable"):
            assert any(reply.id in line for line in text.splitlines() if " ERROR " in line), reply.text


def resident(bench: Bench) -> dict[str, int]:
    status = bench.status()
    return {"epdd": status["rss_bytes"]} | {w["name"]: w["rss_bytes"] for w in status["workers"]}


async def repeated(bench: Bench, case: Case) -> None:
    """No process grows over repetitions of the case; the first runs do not count."""
    assert case.drill is not None
    for _ in range(max(5, case.repeats // 5)):
        await case.drill(bench)
    before = resident(bench)
    for _ in range(case.repeats):
        await case.drill(bench)
    await at_rest(bench)
    for name, size in resident(bench).items():
        assert size < before[name] * (1 + RESIDENT_SHARE) + RESIDENT_FLOOR, (name, before[name], size)


async def judge(bench: Bench, case: Case, before: dict[str, Any], neighbour_text: str, sees: bool) -> dict[str, Any]:
    """Run the case and all checks.  Returns the numbers at rest after it; `before`: those before it."""
    assert case.drill is not None
    log = bench.daemon.folder / "log"
    log_start = log.stat().st_size
    neighbour = Neighbour(bench, neighbour_text)
    # A stream ends with its worker: then the case runs without a neighbour.
    beside = None if "pd/0" in case.kills else asyncio.create_task(neighbour.run())
    try:
        async with asyncio.timeout(CASE_S):
            if beside is not None:
                await neighbour.begun.wait()
            await case.drill(bench)
    except BaseException:
        if beside is not None:
            beside.cancel()
        raise
    if beside is not None:
        await neighbour.end(beside)
    after = await settled(bench, case, before)
    if case.repeats:
        await repeated(bench, case)
    await served(bench, sees)
    errors_clean(bench)
    with open(log) as file:
        file.seek(log_start)
        log_clean(bench, file.read())
    return after
