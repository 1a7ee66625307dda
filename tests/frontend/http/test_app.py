"""Routes, error envelopes, request ids, bodies of every kind, the small endpoints."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from epdd.fleet.worker import State
from epdd.ops.status import Status
from epdd.settings.config import Config

from tests.frontend.bench import Bench, hosted, settle, worker

BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()


async def raw(bench: Bench, data: bytes, *, then: bytes = b"") -> bytes:
    """What the server sends for these bytes, up to its closing or half a second of silence."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(bench.url.rpartition(":")[2]))
    writer.write(data)
    answer = b""
    try:
        while piece := await asyncio.wait_for(reader.read(65536), 0.5):
            answer += piece
            if then and b"100 Continue" in answer:
                writer.write(then)
                then = b""
    except TimeoutError:
        pass
    writer.close()
    return answer


def envelope(answer: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    return found


@hosted()
async def test_models(bench: Bench) -> None:
    card = {"id": "tiny-vl", "object": "model", "created": 1_700_000_000, "owned_by": "epdd", "root": "tiny-vl",
            "parent": None, "max_model_len": 4096, "input_modalities": ["text", "image"]}
    answer = await bench.http.get(f"{bench.url}/v1/models")
    assert await answer.json() == {"object": "list", "data": [card]}
    assert await (await bench.http.get(f"{bench.url}/v1/models/tiny-vl")).json() == card
    answer = await bench.http.get(f"{bench.url}/v1/models/org/other")
    assert answer.status == 404 and (await answer.json())["error"]["code"] == "model_not_found"


@hosted()
async def test_the_bare_path_works_too(bench: Bench) -> None:
    answer = await bench.http.post(f"{bench.url}/chat/completions", data=BODY)
    assert answer.status == 200


@pytest.mark.parametrize(("state", "workers", "health", "word", "ready"), [
    ("ready", {"encoder/0": "ready", "pd/0": "ready"}, 200, "ok", 200),
    ("starting", {"encoder/0": "starting", "pd/0": "ready"}, 200, "starting", 503),
    ("starting", {}, 200, "starting", 503),
    ("degraded", {"encoder/0": "ready", "encoder/1": "failed", "pd/0": "ready"}, 200, "degraded", 200),
    ("degraded", {"encoder/0": "gone", "pd/0": "ready"}, 200, "degraded", 503),
    ("degraded", {"encoder/0": "failed", "pd/0": "ready"}, 200, "degraded", 503),
    ("failed", {"encoder/0": "ready", "pd/0": "ready"}, 503, "failed", 503),
    ("draining", {"encoder/0": "ready", "pd/0": "ready"}, 200, "draining", 503),
])
def test_health_and_ready(family: Any, state: str, workers: dict[str, str], health: int, word: str,
                          ready: int) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        bench.status.update(state=state, why=["pd/0 failed: /secret/path"],
                            workers=[worker(*item) for item in workers.items()])
        answer = await bench.http.get(f"{bench.url}/health")
        body = await answer.json()
        assert (answer.status, body["status"]) == (health, word)
        assert body["why"] == [" ".join(item) for item in workers.items() if item[1] != "ready"]
        assert "secret" not in await answer.text()
        assert sum(n for states in body["workers"].values() for n in states.values()) == len(workers)
        assert (await bench.http.head(f"{bench.url}/health")).status == health
        assert (await bench.http.get(f"{bench.url}/ready")).status == ready

    test(family)


@hosted()
async def test_probes_take_no_snapshot(bench: Bench) -> None:
    """They need no key, and a snapshot reads /proc of every worker."""
    def status() -> Any:
        raise AssertionError("a snapshot was taken")

    object.__setattr__(bench.context, "status", status)
    for _ in range(2):
        assert (await bench.http.get(f"{bench.url}/health")).status == 200
        assert (await bench.http.get(f"{bench.url}/ready")).status == 200
    bench.status["state"] = "draining"
    assert (await bench.http.get(f"{bench.url}/ready")).status == 503
    assert (await (await bench.http.get(f"{bench.url}/health")).json())["status"] == "draining"


def test_what_probes_are_told_is_made_anew_only_by_a_change(family: Any) -> None:
    workers = [SimpleNamespace(name=f"{role}/{number}", role=role, state=State.READY, was_ready=True, takes_work=True,
                               fault="", last_error="") for role in ("encoder", "pd") for number in range(32)]
    supervisor: Any = SimpleNamespace(workers=workers, role=lambda role: [w for w in workers if w.role == role])
    admission: Any = SimpleNamespace(draining=False)
    nothing: Any = None
    status = Status(Config(), family, "tiny", supervisor, SimpleNamespace(error=""),    # type: ignore[arg-type]
                    nothing, nothing, admission, nothing)
    first = status.states()
    assert first.state == "ready" and first.workers[32] == ("pd/0", "pd", "ready")
    began = time.thread_time()
    assert all(status.states() is first for _ in range(1000))
    assert time.thread_time() - began < 1000 * 50e-6        # CPU time: a busy machine does not change it
    workers[3].state, workers[3].takes_work = State.GONE, False
    assert status.states().state == "degraded" and status.states().workers[3] == ("encoder/3", "encoder", "gone")
    admission.draining = True
    assert status.states().state == "draining"
    supervisor.workers = workers[:40]
    assert len(status.states().workers) == 40


@hosted()
async def test_ping_and_version(bench: Bench) -> None:
    assert (await bench.http.get(f"{bench.url}/ping")).status == 200
    assert (await (await bench.http.get(f"{bench.url}/version")).json())["version"].count(".") == 2


@hosted()
async def test_unknown_routes_and_methods(bench: Bench) -> None:
    answer = await bench.http.get(f"{bench.url}/v1/responses")
    assert answer.status == 404 and (await answer.json())["error"]["type"] == "invalid_request_error"
    answer = await bench.http.get(f"{bench.url}/v1/chat/completions")
    assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    assert (await answer.json())["error"]["code"] == "method_not_allowed"
    answer = await bench.http.delete(f"{bench.url}/health")
    assert answer.status == 405 and set(answer.headers["Allow"].split(",")) == {"GET", "HEAD"}
    for found in (answer, await bench.http.get(f"{bench.url}/%00{'x' * 3000}")):
        assert len(await found.read()) < 4096 and found.headers["x-request-id"]


@pytest.mark.parametrize(("sent", "echoed"), [
    ("abc-1.2:3_X", "abc-1.2:3_X"), ("a b\tc<script>", "abcscript"), ("x" * 500, "x" * 128), ("\u00e9\u00e9", None),
    ("", None), (None, None),
])
def test_request_ids(family: Any, sent: str | None, echoed: str | None) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        headers = {} if sent is None else {"X-Request-ID": sent}
        for path in ("/health", "/nowhere", "/v1/chat/completions"):
            answer = await bench.http.get(bench.url + path, headers=headers)
            found = answer.headers["x-request-id"]
            assert found == echoed if echoed else found.startswith(("req-", "chatcmpl-"))
        for body in (b"{", BODY, BODY[:-1] + b',"stream":true}'):
            answer = await bench.http.post(f"{bench.url}/v1/chat/completions", headers=headers, data=body)
            assert (answer.headers["x-request-id"] == echoed) == (echoed is not None)

    test(family)


@pytest.mark.parametrize("headers", [
    {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": "nonsense;;;"}, {"Content-Type": ""}, {"Authorization": "Bearer "}, {"Authorization": "x"},
    {"Accept": "text/event-stream", "X-Stainless-Lang": "python", "traceparent": "00-1"},
])
def test_odd_headers_are_accepted(family: Any, headers: dict[str, str]) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        answer = await bench.http.post(f"{bench.url}/v1/chat/completions", headers=headers, data=BODY)
        assert answer.status == 200, await answer.text()

    test(family)


@hosted()
async def test_no_content_type_at_all(bench: Bench) -> None:
    answer = await raw(bench, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                       b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY))
    assert answer.startswith(b"HTTP/1.1 200")


@hosted(server={"max_body_bytes": 5_000_000})
async def test_a_chunked_body(bench: Bench) -> None:
    text = "x" * 3_000_000

    async def pieces() -> Any:
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "metadata": text}).encode()
        for at in range(0, len(body), 7777):
            yield body[at:at + 7777]

    answer = await bench.http.post(f"{bench.url}/v1/chat/completions", data=pieces())
    assert answer.status == 200


@hosted(server={"max_body_bytes": 1000})
async def test_a_body_over_the_limit(bench: Bench) -> None:
    answer = await bench.http.post(f"{bench.url}/v1/chat/completions", data=BODY + b" " * (1000 - len(BODY)))
    assert answer.status == 200
    # The length alone is enough: no byte of the body is sent here.
    answer = await raw(bench, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 200000000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413") and envelope(answer)["code"] == "request_too_large"
    assert b"x-request-id" in answer.lower()
    # Chunked: as soon as it is over.
    answer = await raw(bench, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                       b"800\r\n" + bytes(2048) + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert bench.script.requests[1:] == []


@hosted(server={"max_body_bytes": 3000}, media={"max_inflight_bytes": 5000})
async def test_all_bodies_together_are_bounded(bench: Bench) -> None:
    port = int(bench.url.rpartition(":")[2])
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2900\r\n\r\n"
    slow = []
    for count in (1, 2):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b" " * 2000)        # and no more
        slow.append(writer)
        await settle(lambda: bench.context.stats.gauges["bodies"]() == 2000 * count)
    await asyncio.sleep(0.05)
    answer = await raw(bench, head + b" " * 2900)
    assert answer.startswith(b"HTTP/1.1 429") and envelope(answer)["code"] == "overloaded"
    assert (await bench.chat()).status == 200   # a small one finds room
    assert bench.door.in_flight == 0               # half a request counts for nothing else
    for writer in slow:
        writer.close()
    await settle(lambda: bench.context.stats.gauges["bodies"]() == 0)
    answer = await raw(bench, head + BODY + b" " * (2900 - len(BODY)))
    assert answer.startswith(b"HTTP/1.1 200")


@hosted(server={"max_body_bytes": 1000})
async def test_expect_continue(bench: Bench) -> None:
    head = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Expect: %b\r\nContent-Length: %d\r\n\r\n")
    answer = await raw(bench, head % (b"100-continue", len(BODY)), then=BODY)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    answer = await raw(bench, head % (b"100-continue", 5000))
    assert answer.startswith(b"HTTP/1.1 413") and envelope(answer)["code"] == "request_too_large"
    answer = await raw(bench, head % (b"100-continue", len(BODY)), then=BODY[:-1] + b"!")
    assert b"HTTP/1.1 400" in answer


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 200_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000])
def test_bodies_that_are_no_request(family: Any, body: bytes) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        answer = await bench.http.post(f"{bench.url}/v1/chat/completions", data=body)
        assert answer.status == 400 and (await answer.json())["error"]["type"] == "invalid_request_error"
        assert (await bench.http.post(f"{bench.url}/v1/chat/completions", data=BODY)).status == 200

    test(family)


@hosted()
async def test_a_body_that_never_ends(bench: Bench) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(bench.url.rpartition(":")[2]))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    await settle(lambda: bench.context.stats.running == 1)
    writer.close()
    await settle(lambda: bench.context.stats.running == 0)
    assert bench.context.stats.counts["aborted"] == 1 and bench.door.in_flight == 0


@hosted()
async def test_metrics(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello world")
    await bench.frames(zeta=1)
    await bench.chat(n=0)
    started = time.process_time()
    answer = await bench.http.get(f"{bench.url}/metrics")
    text = await answer.text()
    assert time.process_time() - started < 0.1
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    tokens = len(bench.script.tokenizer.encode("hello world").ids) + 1
    expected = {
        'epdd_requests_total{outcome="completed"}': 1, 'epdd_requests_total{outcome="rejected"}': 1,
        'epdd_requests_total{outcome="aborted"}': 0, 'epdd_http_responses_total{status="200"}': 1,
        'epdd_http_responses_total{status="400"}': 1, "epdd_generation_tokens_total": tokens,
        "epdd_prompt_tokens_total": len(bench.script.requests[0].tokens), "epdd_ignored_fields_total": 1,
        "epdd_num_requests_running": 0, "epdd_num_requests_waiting": 2, "epdd_kv_cache_usage_perc": 0.25,
        'epdd_encode_in_flight{pool="cpu"}': 7, "epdd_encode_queue_jobs": 4, "epdd_arena_used_bytes": 1024,
        "epdd_cache_hits_total": 5, 'epdd_worker_state{state="ready",worker="encoder/0"}': 1,
        'epdd_worker_done_total{worker="pd/0"}': 3, "epdd_time_to_first_token_seconds_count": 1,
        "epdd_e2e_request_latency_seconds_count": 1, 'epdd_errors_total{code="invalid_request"}': 1,
        'epdd_router_info{policy="earliest",unit="image"}': 1, "epdd_router_ratio": 6, "epdd_router_ratio_set": 6,
        "epdd_encode_queue_oldest_seconds": 1.5, "epdd_encode_queue_cost": 256,
        'epdd_worker_share{worker="encoder/0"}': 0.25, 'epdd_worker_slowness{worker="encoder/0"}': 1.75,
        'epdd_held_bytes{what="images"}': 0, 'epdd_held_bytes{what="bodies"}': 0,
    }
    assert {name: float(lines[name]) for name in expected} == expected
    for absent in ("epdd_router_budget_cpu", "epdd_router_ratio_measured", 'epdd_worker_share{worker="pd/0"}'):
        assert absent not in lines      # unbounded, unknown or of no meaning is not a number


def test_lean(family: Any) -> None:
    """The frontend as in the daemon, with the checkpoint's tokenizer."""
    code = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
import uvloop
import epdd.frontend.app
from epdd import families
from epdd.checkpoint import prompt_files
from epdd.frontend.text.prompt import PromptMaker
family = families.load({family.folder!r})
maker = PromptMaker(family, prompt_files(family), ThreadPoolExecutor(1))
for name in ("torch", "transformers", "pydantic", "huggingface_hub", "numpy", "PIL"):
    assert name not in sys.modules, name
print(int(open("/proc/self/statm").read().split()[1]) * 4096)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 65e6


@hosted(model={"aliases": ("gpt-4o", "org/small")})
async def test_aliases(bench: Bench) -> None:
    cards = (await (await bench.http.get(f"{bench.url}/v1/models")).json())["data"]
    assert [(card["id"], card["root"]) for card in cards] == [
        ("tiny-vl", "tiny-vl"), ("gpt-4o", "tiny-vl"), ("org/small", "tiny-vl")]
    assert (await (await bench.http.get(f"{bench.url}/v1/models/org/small")).json())["id"] == "org/small"
    for asked, named in (("gpt-4o", "gpt-4o"), ("tiny-vl", "tiny-vl"), (None, "tiny-vl")):
        assert (await (await bench.chat(model=asked)).json())["model"] == named
    assert (await bench.chat(model="org")).status == 404


@hosted(server={"strict": True})
async def test_strict(bench: Bench) -> None:
    answer = await bench.chat(temprature=0)
    error = (await answer.json())["error"]
    assert answer.status == 400 and error["param"] == "temprature" and error["message"].startswith("temprature is not")
    assert (await bench.chat(user="me", store=True, top_k=5)).status == 200
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"}),
                       ("/detokenize", {"tokens": []})):
        assert (await bench.http.post(bench.url + path, json=body)).status == 200
        assert (await bench.http.post(bench.url + path, json={**body, "zeta": 1})).status == 400


@pytest.mark.parametrize("data", [
    b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-secret" + b"y" * 20000 + b"\r\n\r\n", b"sk-secret\r\n\r\n",
    b"GET /sk-secret" + b"y" * 20000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: sk-secret\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nsk-secret\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\nsk-secret",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\nContent-Length: 9\r\n\r\nsk-secret",
], ids=range(7))
def test_what_is_no_http_is_refused_and_not_logged(family: Any, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        answer = await raw(bench, data)
        status = 415 if b"Content-Encoding" in data else 400
        assert answer.partition(b" ")[2].startswith(b"%d " % status)
        error = envelope(answer)
        assert error["type"] == "invalid_request_error" and b"sk-secret" not in answer
        assert b"x-request-id: " in answer and b"Server: epdd" in answer
        stats = bench.context.stats
        assert stats.statuses == {status: 1} and stats.errors == {error["code"]: 1}
        assert (await bench.chat()).status == 200 and bench.door.in_flight == 0

    test(family)
    assert caplog.text == ""


@hosted(server={"api_keys": ("sk-one",)})
async def test_compressed_bodies_are_never_unpacked(bench: Bench) -> None:
    """A megabyte can hold a gigabyte: refused unread, with or without a key, on any path."""
    packed = gzip.compress(bytes(8 << 20), 9)
    for path, headers, status, code in (
            ("/v1/chat/completions", {"Authorization": "Bearer sk-one"}, 415, "unsupported_encoding"),
            ("/v1/chat/completions", {"Authorization": "Bearer sk-two"}, 401, "invalid_api_key"),
            ("/nowhere", {"Authorization": "Bearer sk-one"}, 404, "not_found")):
        async with bench.http.post(bench.url + path, data=packed,
                                   headers={"Content-Encoding": "gzip", **headers}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (status, code)
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    async with bench.http.post(f"{bench.url}/v1/chat/completions", data=body, headers={
            "Content-Encoding": "identity", "Authorization": "Bearer sk-one"}) as answer:
        assert answer.status == 200
