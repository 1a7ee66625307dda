"""The daemon's own CPU time for a request, beside a handler that only echoes.

    python -m tools.bench.serving.daemon

The daemon is real, the emulated workers answer at once.  Measured is the CPU time of the daemon's process, from /proc.
Prints CPU milliseconds a request without images, CPU microseconds a streamed token, and the same of a minimal aiohttp
server (JSON in, JSON out; a stream of equal chunks), in one run, alternating.

Then the CPU time of /health and /ready beside /ping, with --workers encoders: these need no API key.

Then `--burst` requests at once: all must be answered.  A third process that polls /version measures how late the event
loop is.  Last, the time to the first token of a text request, alone and while images are queued.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from tools.bench import live
from aiohttp import web

PROFILE = """
name = "instant"
about = "for measuring the daemon: encoders at 20 ms an image, prefill and decode next to nothing"
answers = "rows"
[model]
hidden = 64
planes = 1
dtype = "bfloat16"
patch = 16
merge = 2
min_pixels = 1024
max_pixels = 16777216
[[encoder]]
kind = "cpu"
count = 1
seconds = {a = 0.02}
[[pd]]
kind = "gpu"
count = 1
prefill_tokens_per_s = 1e9
decode = {a = 1e-5}
kv_tokens = 4000000
context_max = 131072
"""
RNG = random.Random(0)
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
TEXT = "Name three colours and say in one sentence why each of them is used on road signs. " * 4


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def body(stream, tokens, images=0):
    """A request with this many small pictures, unique to it."""
    return live.body([(320, 240)] * images, TEXT, RNG, max_tokens=tokens, ignore_eos=True, stream=stream)


async def ask(session, url, data):
    """(seconds to the first byte of the answer, seconds to its end)."""
    began = time.perf_counter()
    async with session.post(url, data=data, headers={"Content-Type": "application/json"}) as answer:
        first = None
        async for _ in answer.content.iter_any():
            first = first or time.perf_counter() - began
        assert answer.status == 200, answer.status
    return first, time.perf_counter() - began


async def cost(session, url, pid, count, data, together):
    """CPU seconds of process `pid` for each of `count` requests, `together` at a time."""
    before, todo = cpu_s(pid), iter(range(count))

    async def one():
        for _ in todo:
            await ask(session, url, data)
    await asyncio.gather(*(one() for _ in range(together)))
    return (cpu_s(pid) - before) / count


def echo(port):
    """The baseline's process: a plain aiohttp server with the same requests and answers."""
    async def handle(request):
        asked = await request.json()
        text = "a token"
        if not asked["stream"]:
            return web.json_response({"choices": [{"message": {"content": text}}], "asked": asked["messages"]})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(asked["max_tokens"]):
            await answer.write(b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n")
            await asyncio.sleep(0)
        return answer

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


async def measure(args, url, pid, echo_url, echo_pid):
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        plain, streamed = [], []
        for _ in range(args.repeats):
            row = [await cost(session, at, one, args.requests, body(False, 1), 8)
                   for at, one in ((url, pid), (echo_url, echo_pid))]
            plain.append([1e3 * seconds for seconds in row])
            row = []
            for at, one in ((url, pid), (echo_url, echo_pid)):
                few, many = [await cost(session, at, one, args.streams, body(True, tokens), 8) for tokens in (1, 257)]
                row.append(1e6 * (many - few) / 256)
            streamed.append(row)
        for name, unit, rows in (("request without images", "ms CPU", plain), ("streamed token", "us CPU", streamed)):
            ours, base = (statistics.median(column) for column in zip(*rows))
            print(f"{name:24} {ours:7.2f} {unit}   echo {base:7.2f} {unit}   {ours / base:.1f} x   "
                  f"(medians of {args.repeats})")
        await probes(session, url, pid, args)
        await burst(session, url, args.burst, urlsplit(url).port)


async def probes(session, url, pid, args):
    """CPU of the three probes, in turns."""
    found = {page: [] for page in ("/ping", "/health", "/ready")}
    for _ in range(args.repeats):
        for page, costs in found.items():
            before = cpu_s(pid)
            for _ in range(args.requests):
                async with session.get(url.replace("/v1/chat/completions", page)) as answer:
                    assert answer.status == 200, answer.status
                    await answer.read()
            costs.append(1e6 * (cpu_s(pid) - before) / args.requests)
    ping = statistics.median(found["/ping"])
    print(f"probe with {args.workers} encoders: /ping {ping:.0f} us CPU, " + ", ".join(
        f"{page} {statistics.median(costs) - ping:+.0f}" for page, costs in found.items() if page != "/ping"))


def look(port):
    """In another process, poll /version on one connection until ended, then report the time of each answer: the delay
    of the event loop, plus the answer itself."""
    found, stop = [], []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while not stop:
            began = time.perf_counter()
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            sock.recv(4096)
            found.append(time.perf_counter() - began)
            time.sleep(0.002)
    print(json.dumps(sorted(found)))


async def burst(session, url, count, port):
    bodies = [body(True, 16) for _ in range(count)]

    async def while_looking(work):
        looker = subprocess.Popen([sys.executable, "-m", __spec__.name, "--look", "--port", str(port)],
                                  stdout=subprocess.PIPE)
        await asyncio.sleep(0.5)
        result = await work
        looker.send_signal(signal.SIGTERM)
        return result, json.loads(looker.communicate()[0])

    _, rest = await while_looking(asyncio.sleep(1))
    answers, found = await while_looking(asyncio.gather(*(ask(session, url, data) for data in bodies)))
    p99, p99_rest = (1e3 * times[int(0.99 * (len(times) - 1))] for times in (found, rest))
    print(f"{count} at once: {len(answers)} answered, the last after {max(end for _, end in answers):.2f} s; loop "
          f"late p99 {p99:.0f} ms, worst {1e3 * found[-1]:.0f} ms meanwhile; p99 {p99_rest:.0f} ms at rest "
          f"({len(found)} looks)")

    async def first_tokens():
        found = [(await ask(session, url, body(True, 4)))[0] for _ in range(40)]
        return statistics.median(found)
    alone = await first_tokens()
    queued = [asyncio.create_task(ask(session, url, body(False, 1, 8))) for _ in range(30)]
    await asyncio.sleep(0.5)
    beside = await first_tokens()
    left = sum(not task.done() for task in queued)
    print(f"text, first token: {1e3 * alone:.1f} ms alone, {1e3 * beside:.1f} ms while images are queued "
          f"({beside / alone:.2f} x; {left} of 30 image requests still waiting at the end)")
    await asyncio.gather(*queued)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--burst", type=int, default=500)
    parser.add_argument("--workers", type=int, default=1, help="encoders")
    parser.add_argument("--port", type=int, default=18771, help="of the echoing handler")
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.echo:
        return echo(args.port)
    if args.look:
        return look(args.port)
    asyncio.run(run(args))


async def run(args):
    sets = ["arena.bytes=67108864", "server.max_requests=1000"]
    baseline = subprocess.Popen([sys.executable, "-m", __spec__.name, "--echo", "--port", str(args.port)])
    try:
        profile = PROFILE.replace('kind = "cpu"\ncount = 1', f'kind = "cpu"\ncount = {args.workers}')
        async with live.running(profile, sets) as daemon:
            await until_open(args.port)
            await measure(args, daemon.chat_url, daemon.pid,
                          f"http://127.0.0.1:{args.port}/v1/chat/completions", baseline.pid)
    finally:
        baseline.terminate()
        baseline.wait()


async def until_open(port):
    """Wait until a process listens there."""
    async with asyncio.timeout(60):
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                await asyncio.sleep(0.05)


if __name__ == "__main__":
    main()
