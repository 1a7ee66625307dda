"""The daemon as users see it: start, health, right answers about pictures, faults, bad input, leaks, stop."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import openai
import psutil
import pytest
from PIL import Image, ImageDraw

from tests.e2e.daemon import ROOT, image_part, running, text_part

pytestmark = pytest.mark.takes(70)

SAMPLES = ROOT / "epdd" / "demo" / "samples"
COLOURS = {"red": (230, 20, 20), "green": (20, 160, 40), "blue": (20, 40, 230)}


@pytest.fixture(scope="module")
def daemon():
    """One demo-model daemon with two encoders, shared by the tests that do not break it."""
    with running(encoder__workers=2) as daemon:
        yield daemon.ready()


def circle(colour, size=160, shift=0):
    image = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(image).ellipse((20 + shift, 20, size - 20 + shift, size - 20), fill=COLOURS[colour])
    return image


def square(colour, size=160):
    image = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(image).rectangle((30, 30, size - 30, size - 30), fill=COLOURS[colour])
    return image


def test_importing_the_daemon_imports_no_torch():
    heavy = ("torch", "transformers", "numpy", "llguidance")
    code = f"import sys, epdd.daemon; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"


def test_health_answers_while_weights_load():
    with running() as daemon:
        status, body = daemon.get("/health")
        assert (status, body["status"]) == (200, "starting")
        assert daemon.get("/ready")[0] == 503
        status, body = daemon.post({"messages": [{"role": "user", "content": "hi"}]})
        assert status == 503 and body["error"]["code"] == "no_worker"
        daemon.ready()
        assert daemon.get("/ready")[0] == 200 and daemon.get("/health")[1]["status"] == "ok"
        # Torch's own word on what it computes with, from the worker itself.
        assert daemon.worker("encoder/0")["abilities"][0] in {"AVX512", "AVX2", "DEFAULT", "NO AVX"}


def test_the_daemon_stays_small(daemon):
    daemon.say([image_part(circle("red")), text_part("What colour is the circle?")])
    assert psutil.Process(daemon.process.pid).memory_info().rss < 80e6
    assert "torch" not in Path(f"/proc/{daemon.process.pid}/maps").read_text()


def test_true_answers_about_pictures(daemon):
    for colour in COLOURS:
        answer = daemon.say([image_part(circle(colour)), text_part("What colour is the circle?")])
        assert colour in answer.lower()
    listing = daemon.say([image_part(circle("red")), image_part(square("blue")), image_part(circle("green")),
                          text_part("List the images in order.")], max_tokens=60).lower()
    places = [listing.find(words) for words in ("red circle", "blue square", "green circle")]
    assert -1 not in places and places == sorted(places)


def test_the_lines_it_prints_can_be_pasted(daemon):
    text = daemon.log()
    ctl = next(line for line in text.splitlines() if " chat -i " in line)
    curl = text[text.index("  curl -s"):].split("\n\n")[0]
    for command in (ctl, curl):
        ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
        assert ended.returncode == 0 and "red" in ended.stdout, (command, ended)


def test_eight_images_use_all_encoders_and_repeats_hit_the_cache(daemon):
    images = [image_part(circle("red", 300 + 4 * i)) for i in range(8)]
    before = daemon.status()
    daemon.ask("policy", policy="round-robin")      # the others leave out an encoder that was slow at its start
    daemon.say([*images, text_part("List the images in order.")])
    daemon.ask("policy", policy=before["router"]["policy"])
    after = daemon.status()
    done = [after["workers"][i]["done"] - before["workers"][i]["done"] for i in range(2)]
    assert sum(done) == 8 and min(done) >= 1
    daemon.say([*images, text_part("How many shapes are there?")])
    assert daemon.status()["cache"]["hits"] == after["cache"]["hits"] + 8
    metrics = daemon.get("/metrics")[1]
    hits = next(line for line in metrics.splitlines() if line.startswith("epdd_cache_hits"))
    assert float(hits.split()[-1]) == daemon.status()["cache"]["hits"]


def test_a_killed_worker_comes_back_and_requests_are_served(daemon):
    for name in ("encoder/0", "pd/0"):
        pid = daemon.worker(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        daemon.wait(lambda s: next(w for w in s["workers"] if w["name"] == name)["pid"] not in (pid, None)
                    and s["state"] == "ready", 30)
        assert "red" in daemon.say([image_part(circle("red", 170)), text_part("What colour is the circle?")]).lower()


def bad_png():
    buffer = io.BytesIO()
    circle("red").save(buffer, "PNG")
    return buffer.getvalue()[:200]


BAD = [
    ({"messages": []}, 400, "messages"),
    ({}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, 400, "temperature"),
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, 400, "max_tokens"),
    ({"messages": [{"role": "user", "content": "x"}], "top_p": 7}, 400, "top_p"),
    ({"messages": [{"role": "user", "content": "x"}], "model": "gpt-9"}, 404, "model"),
    ({"messages": [{"role": "user", "content": "word " * 50_000}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "video", "video": 1}]}]}, 400, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [image_part(b"no image")]}]}, 400, None),
    ({"messages": [{"role": "user", "content": [image_part(bad_png())]}]}, 400, None),
    ({"messages": [{"role": "user", "content": [image_part(b"")]}]}, 400, None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://127.0.0.1:1/"}]}]},
     400, None),
    (b"{not json", 400, None),
    (b"[" * 100_000, 400, None),
]


@pytest.mark.parametrize("body, status, param", BAD, ids=range(len(BAD)))
def test_bad_input_is_named_and_harms_nothing(daemon, body, status, param):
    before = daemon.at_rest()
    got, answer = daemon.post(body)
    error = answer["error"]
    assert got == status and set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if param:
        assert error["param"].startswith(param)
    after = daemon.at_rest()
    assert after["pids"] == before["pids"] and after["pinned"] == 0


def test_the_official_client(daemon):
    content = [{"type": "text", "text": "What colour is the circle?"}, image_part(circle("blue"))]
    messages = [{"role": "user", "content": content}]
    options = {"model": "epdd-demo", "messages": messages, "temperature": 0, "max_tokens": 12}
    client = openai.OpenAI(base_url=daemon.url("/v1"), api_key="none")
    assert [model.id for model in client.models.list()] == ["epdd-demo"]
    whole = client.chat.completions.create(**options)
    text = whole.choices[0].message.content
    usage = whole.usage
    assert "blue" in text.lower() and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**(options | {"model": "other"}))
    assert caught.value.code == "model_not_found"

    async def both():
        client = openai.AsyncOpenAI(base_url=daemon.url("/v1"), api_key="none")
        whole = await client.chat.completions.create(**options)
        stream = await client.chat.completions.create(**options, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(parts)

    assert asyncio.run(both()) == (text, text)


def test_sigterm_lets_a_running_request_end_and_leaves_no_process():
    with running() as daemon:
        daemon.ready()
        pids = [worker["pid"] for worker in daemon.status()["workers"]]

        async def stop_midway():
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 300, "ignore_eos": True,
                    "stream": True}
            async with aiohttp.ClientSession() as session:
                async with session.post(daemon.url("/v1/chat/completions"), json=body) as answer:
                    await answer.content.readline()
                    daemon.process.send_signal(signal.SIGTERM)
                    return (await answer.content.read()).decode()

        assert asyncio.run(stop_midway()).rstrip().endswith("data: [DONE]")
        assert daemon.process.wait(60) == 0
        assert not any(psutil.pid_exists(pid) for pid in pids) and not daemon.socket_path.exists()


def test_sighup_takes_a_new_policy_and_refuses_a_broken_file(tmp_path):
    settings = tmp_path / "epdd.toml"
    settings.write_text("[router]\npolicy = \"budget\"\n")
    with running() as daemon:
        pass
    command = [sys.executable, "-m", "epdd", "--port", "0", "--config", str(settings), "--set",
               f"admin.socket={tmp_path}/s", "--set", "arena.bytes=0x4000000"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log, stdout=log)
    daemon.process, daemon.socket_path, daemon.folder = process, tmp_path / "s", tmp_path
    try:
        daemon.ready()
        settings.write_text("[router]\npolicy = \"earliest\"\n")
        process.send_signal(signal.SIGHUP)
        daemon.wait(lambda s: s["router"]["policy"] == "earliest", 120)
        settings.write_text("[router]\npolicy = \"fastest\"\n")
        process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 10
        while "refused" not in daemon.log() and time.monotonic() < end:
            time.sleep(0.05)
        assert "router.policy is 'fastest'" in daemon.log()
        assert daemon.status()["router"]["policy"] == "earliest"
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_a_bad_model_ends_with_78_and_says_why(tmp_path):
    command = [sys.executable, "-m", "epdd", "--port", "0", "--model", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 78 and "config.json" in ended.stderr and "Traceback" not in ended.stderr
