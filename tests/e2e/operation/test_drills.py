"""Faults around the daemon: no descriptors, taken ports, damaged weights, SIGTERM under load, slow readers."""

import asyncio
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import aiohttp

from epdd import families
from tests.e2e.daemon import ROOT, running

# Without torch: it starts in a second, and answers with max_tokens tokens.
LIGHT = {"emulation__profile": "router-table", "encoder__workers": "gpu:1", "pd__workers": "gpu:1"}
SHORT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 15_000, "stream": True}       # a thousand tokens a second


def test_out_of_descriptors_who_is_connected_is_served_and_a_lost_worker_comes_back_later():
    with running(**LIGHT, fleet__backoff_s=0.05, fleet__max_failures=99) as daemon:
        pid, lost = daemon.process.pid, daemon.ready().worker("encoder/0")
        kept = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=30)

        def ask(method, path, body=None):
            kept.request(method, path, body)
            return json.loads(kept.getresponse().read())

        assert ask("GET", "/ping") == {"status": "ok"}
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        with daemon.healing():
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))       # nothing more can be opened
            os.kill(lost["pid"], signal.SIGKILL)
            end = time.monotonic() + 30
            while time.monotonic() < end:           # until it has been tried again, in vain
                worker = next(worker for worker in ask("GET", "/status")["workers"] if worker["name"] == lost["name"])
                if worker["restarts"] >= 2:
                    break
                assert ask("POST", "/v1/chat/completions", json.dumps(SHORT))["choices"]
                time.sleep(0.05)
            assert ask("GET", "/health")["status"] == "degraded"
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            kept.close()
        found = daemon.worker(lost["name"])
        assert found["pid"] != lost["pid"] and "Too many open files" in found["last_error"]
        assert daemon.post(SHORT)[0] == 200


def test_silent_clients_up_to_the_limit_keep_nobody_out():
    """More clients with half a head than descriptors: other clients, epdctl and workers still get descriptors."""
    with running(**LIGHT, fleet__backoff_s=0.05) as daemon:
        pid, lost = daemon.process.pid, daemon.ready().worker("encoder/0")
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 20)   # a shell's is mostly 1,024
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (256, hard))
        silent = []
        try:
            for _ in range(400):
                silent.append(socket.create_connection(("127.0.0.1", daemon.port), timeout=30))
                silent[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A:")
            for _ in range(5):
                assert daemon.get("/health")[0] == 200 and daemon.post(SHORT)[0] == 200
            with daemon.healing():
                os.kill(lost["pid"], signal.SIGKILL)
                daemon.wait(lambda status: status["workers"][0]["pid"] not in (lost["pid"], None))
            assert len(os.listdir(f"/proc/{pid}/fd")) < 256
            assert "connections are at their limit" in daemon.log()
        finally:
            for client in silent:
                client.close()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))


def test_a_worker_that_stands_still_is_replaced_and_nobody_else_waits_for_it():
    with running(**LIGHT, fleet__stall_s=2) as daemon:
        pid = daemon.ready().worker("encoder/0")["pid"]
        with daemon.healing():
            os.kill(pid, signal.SIGSTOP)
            answered = 0
            while daemon.worker("encoder/0")["pid"] == pid:
                assert daemon.post(SHORT)[0] == 200
                answered += 1
        assert answered and "standing still" in daemon.worker("encoder/0")["last_error"]


def test_two_daemons_and_a_place_that_is_taken():
    def refused(*settings):
        ended = subprocess.run([sys.executable, "-m", "epdd", *settings], capture_output=True, text=True, cwd=ROOT,
                               timeout=60)
        assert ended.returncode == 75 and "Traceback" not in ended.stderr
        return ended.stderr

    with running(**LIGHT) as first, running(**LIGHT) as second:
        first.ready(), second.ready()
        assert f"cannot listen on 127.0.0.1:{first.port}" in refused("--port", str(first.port))
        taken = refused("--port", "0", "--set", f"admin.socket={second.socket_path}")
        assert "another daemon listens" in taken
        assert first.post(SHORT)[0] == second.post(SHORT)[0] == 200
        first.process.kill()
        first.process.wait()
        assert second.post(SHORT)[0] == 200 and second.status()["state"] == "ready"
        assert all(worker["restarts"] == 0 for worker in second.status()["workers"])


def test_weights_cut_short_while_running_harm_only_who_reads_them_anew(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(families.DEMO, folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    with running(model=folder, encoder__workers=1, fleet__backoff_s=0.05, fleet__max_failures=2) as daemon:
        daemon.ready()
        os.truncate(weights, len(whole) // 2)
        os.kill(daemon.worker("encoder/0")["pid"], signal.SIGKILL)
        status = daemon.wait(lambda s: any(worker["state"] == "FAILED" for worker in s["workers"]), 60)
        reason, = status["why"]
        assert "died 2 times in a row" in reason and "weights cannot be loaded" in reason
        health = daemon.get("/health")
        assert (health[0], health[1]["status"], health[1]["why"]) == (200, "degraded", ["encoder/0 failed"])
        assert daemon.say("Hello").startswith("Hello!")
        weights.write_bytes(whole)
        with daemon.healing():
            daemon.ask("resume", worker="encoder/0")


def test_weights_cut_short_before_the_start_end_it_at_once(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(families.DEMO, folder)
    os.truncate(folder / "model.safetensors", 1 << 20)
    command = [sys.executable, "-m", "epdd", "--port", "0", "--model", str(folder), "--set",
               f"admin.socket={tmp_path}/s"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.returncode == 78 and "Traceback" not in ended.stderr
    assert f"epdd: {folder}/model.safetensors: 1048576 bytes long" in ended.stderr and "cut short" in ended.stderr
    assert "encoder/0" not in ended.stderr      # no worker was started


def test_sigterm_under_load_ends_within_the_limit_and_breaks_with_an_error():
    with running(**LIGHT, server__shutdown_timeout_s=1) as daemon:
        daemon.ready()
        told = asyncio.run(stopped(daemon))
        assert daemon.process.wait(60) == 0
        assert events(told)[-1]["error"]["code"] == "worker_lost"
        assert not any(choice["finish_reason"] for event in events(told)[:-1] for choice in event["choices"])


async def stopped(daemon):
    """The end of a stream that is too long for a stop."""
    url = daemon.url("/v1/chat/completions")
    async with aiohttp.ClientSession() as session, session.post(url, json=LONG) as answer:
        first = await answer.content.readline()
        daemon.process.send_signal(signal.SIGTERM)
        while True:     # until the signal has arrived
            async with session.post(url, json=SHORT) as late:
                if late.status != 200:
                    assert late.status == 503 and (await late.json())["error"]["code"] == "no_worker"
                    break
        return (first + await answer.content.read()).decode()


def test_a_slow_reader_holds_up_nobody_and_gets_all():
    with running(**LIGHT, emulation__scale=5) as daemon:
        daemon.ready()
        body = json.dumps(LONG).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", daemon.port))
            slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(body) + body)
            daemon.wait(lambda s: any(w["in_flight"] for w in s["workers"]), 30)
            assert daemon.post(SHORT)[0] == 200
            # The worker waits for no reader: its answer waits in the daemon.
            daemon.wait(lambda s: not any(w["in_flight"] for w in s["workers"]), 60)
            assert daemon.post(SHORT)[0] == 200
            told = b"".join(iter(lambda: slow.recv(1 << 16), b"")).decode()
        assert "data: [DONE]" in told and told.count('"finish_reason":"length"') == 1
        daemon.at_rest()


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
