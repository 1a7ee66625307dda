"""An emulated fleet under the real daemon: labelled everywhere, right leases, and no leaks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import aiohttp
import pytest
from PIL import Image

from tests.e2e.daemon import ROOT, image_part, running, text_part

PROFILE = """
name = "tiny-fleet"
about = "one GPU and two CPU encoders, two GPUs for prefill and decode, small rows"
answers = "rows"
scale = 100
[model]
hidden = 256
planes = 2
dtype = "bfloat16"
patch = 16
merge = 2
min_pixels = 1024
max_pixels = 1048576
[[encoder]]
kind = "gpu"
count = 1
seconds = {a = 0.5, b = 1e-4}
[[encoder]]
kind = "cpu"
count = 2
seconds = [[16, 1.0], [4096, 3.0]]
jitter = 0.1
[[pd]]
kind = "gpu"
count = 2
prefill_tokens_per_s = 1000
decode = {a = 0.02, b = 0.001}
kv_tokens = 65536
context_max = 16384
"""


def picture(i: int) -> Image.Image:
    return Image.new("RGB", (320 + 32 * (i % 5), 320), (i % 256, i // 256, 99))


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    file = tmp_path_factory.mktemp("profiles") / "tiny.toml"
    file.write_text(PROFILE)
    return file


@pytest.fixture(scope="module")
def daemon(profile):
    with running(emulation__profile=profile, pd__kv_tokens=0, arena__bytes=4 << 20) as daemon:
        yield daemon.ready()


def test_status_metrics_and_model_list_say_so(daemon):
    label = {"profile": "tiny-fleet", "about": "one GPU and two CPU encoders, two GPUs for prefill and decode, small "
             "rows", "answers": "rows", "scale": 100.0}
    status = daemon.status()
    assert status["emulated"] == label
    assert [(worker["name"], worker["device"]) for worker in status["workers"]] == [
        ("encoder/0", "cuda:0"), ("encoder/1", "cpu"), ("encoder/2", "cpu"), ("pd/0", "cuda:1"), ("pd/1", "cuda:2")]
    assert (status["router"]["n_cpu"], status["router"]["n_gpu"]) == (2, 1)
    (model,) = daemon.get("/v1/models")[1]["data"]
    assert (model["id"], model["emulated"], model["max_model_len"]) == ("emulated-tiny-fleet", label, 16384)
    assert 'epdd_emulated{answers="rows",profile="tiny-fleet",scale="100"} 1.0' in daemon.get("/metrics")[1]
    shown = subprocess.run([sys.executable, "-m", "epdd.ctl.main", "--socket", daemon.socket_path, "status"],
                           capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0 and "emulated" in shown.stdout.split("tiny-fleet, 100 times")[0], shown


def test_light_workers_hold_no_torch(daemon):
    for worker in daemon.status()["workers"]:
        with open(f"/proc/{worker['pid']}/maps") as maps:
            assert "torch" not in maps.read()


def test_many_requests_at_once_leave_nothing(daemon):
    """The arena holds a few images, so that leases are reused often; each is compared byte by byte."""
    before = daemon.at_rest()

    def ask(i):
        parts = [image_part(picture(i + k)) for k in range(3)]
        return daemon.chat([*parts, text_part("What is this?")], max_tokens=24, ignore_eos=True)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(0, 180, 3)))
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {24}
    assert all(answer["choices"][0]["message"]["content"].startswith("This answer is emulated") for answer in answers)
    after = daemon.at_rest()
    assert after["pinned"] == after["waiting"] == after["i_cpu"] == 0 and after["pids"] == before["pids"]
    workers = daemon.status()["workers"]
    assert sum(worker["done"] for worker in workers if worker["role"] == "encoder") >= 180
    assert sum(worker["failed"] for worker in workers) == 0
    assert all(worker["done"] for worker in workers)


def test_clients_that_leave_leave_nothing(daemon):
    """Half of them leave in decode, after their first token, the others at any stage."""
    async def ask(client, i):
        body = {"messages": [{"role": "user", "content": [*(image_part(picture(200 + 3 * i + k)) for k in range(3)),
                                                          text_part("What is this?")]}],
                "max_tokens": 12000, "ignore_eos": True, "stream": True}
        with suppress(TimeoutError):
            async with (asyncio.timeout(None if i % 2 else 0.004 * i),
                        client.post(daemon.url("/v1/chat/completions"), json=body) as answer):
                await answer.content.readline()

    async def storm():
        async with aiohttp.ClientSession() as client:
            await asyncio.gather(*(ask(client, i) for i in range(60)))

    asyncio.run(storm())
    after = daemon.at_rest()
    assert after["pinned"] == after["waiting"] == after["i_cpu"] == 0
    requests = daemon.status()["requests"]
    assert requests["aborted"] >= 30 and requests["failed"] == 0
    assert sum(worker["failed"] for worker in daemon.status()["workers"]) == 0


def test_an_answer_may_end_by_itself_and_other_sizes_are_other_rows(daemon):
    whole = daemon.chat([image_part(picture(1)), text_part("What is this?")], max_tokens=500)
    assert whole["choices"][0]["finish_reason"] == "stop"
    small = daemon.chat([image_part(picture(1)), text_part("What is this?")], mm_processor_kwargs={"max_pixels": 4096})
    assert small["usage"]["prompt_tokens"] < whole["usage"]["prompt_tokens"]


def test_a_check_of_the_placement_moves_nobody(daemon):
    before = daemon.at_rest()["pids"]
    daemon.ask("reload")
    assert daemon.at_rest()["pids"] == before and daemon.status()["placement"] == {"changes": [], "error": ""}


def test_a_plan_is_shown_without_starting_anything(profile):
    shown = subprocess.run([sys.executable, "-m", "epdd.ctl.main", "plan", "--why", "--set", "encoder.workers=gpu:1",
                            "--set", f"emulation.profile={profile}"], capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0 and "profile tiny-fleet" in shown.stdout and "encoder/1" not in shown.stdout, shown


def test_the_demo_models_true_answers_at_modelled_times():
    with running(emulation__profile="laptop", emulation__scale=5) as daemon:
        daemon.ready()
        for sample in ("red-circle", "yellow-star"):
            colour, shape = sample.split("-")
            data = (ROOT / "epdd" / "demo" / "samples" / f"{sample}.png").read_bytes()
            assert colour in daemon.say([image_part(data), text_part(f"What colour is the {shape}?")]).lower()
        assert daemon.status()["emulated"]["answers"] == "demo"
        assert daemon.get("/v1/models")[1]["data"][0]["id"] == "epdd-demo"
        assert daemon.at_rest()["pinned"] == 0
