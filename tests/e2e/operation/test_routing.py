"""`epdctl policy` and `epdctl explain` on the real daemon."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from tests.e2e.daemon import ROOT, image_part, running, text_part


@pytest.fixture(scope="module")
def daemon():
    with running(encoder__workers=2, router__policy="least-loaded") as daemon:
        yield daemon.ready()


def epdctl(daemon, *argv):
    return subprocess.run([sys.executable, "-m", "epdd.ctl.main", "--socket", str(daemon.socket_path), *argv],
                          capture_output=True, text=True, cwd=ROOT)


def picture(number):
    return image_part(Image.new("RGB", (96, 96 + 32 * number), (0, 40 * number, 200)))


def test_a_policy_is_switched_at_once_until_the_next_reload(daemon):
    shown = epdctl(daemon, "policy", "round-robin", "--unit", "image", "--ratio", "6")
    assert shown.returncode == 0 and "* round-robin" in shown.stdout and "R         6 set" in shown.stdout
    router = daemon.status()["router"]
    assert (router["policy"], router["unit"], router["ratio_set"]) == ("round-robin", "image", 6.0)
    assert "router policy=round-robin unit=image ratio=6.0" in daemon.log()
    assert 'epdd_router_info{policy="round-robin",unit="image"' in daemon.get("/metrics")[1]
    answer = daemon.chat([*map(picture, range(4)), text_part("List the images in order.")])
    images = daemon.ask("explain", request=answer["id"])["images"]
    assert [image["hand_overs"][0]["reason"] for image in images] == ["its turn"] * 4
    assert sorted(image["hand_overs"][0]["worker"] for image in images) == [
        "encoder/0", "encoder/0", "encoder/1", "encoder/1"]
    for argv, allowed in ((["fast"], "least-loaded, round-robin"), (["--unit", "kilo"], "request, image, patch")):
        refused = epdctl(daemon, "policy", *argv)
        assert refused.returncode == 1 and allowed in refused.stderr
    daemon.process.send_signal(signal.SIGHUP)
    router = daemon.wait(lambda status: status["router"]["policy"] == "least-loaded", 120)["router"]
    assert (router["unit"], router["ratio_set"]) == ("patch", None)


@pytest.mark.parametrize("fields, words", [
    ({"policy": 7}, "text expected"), ({"unit": "Patch"}, "request, image, patch"), ({"ratio": "six"}, "a number"),
    ({"ratio": -1}, "negative"), ({"policy": "earliest", "ratio": []}, "a number")])
def test_what_is_refused_changes_nothing(daemon, fields, words):
    before = daemon.ask("policy")
    with pytest.raises(AssertionError, match=words):
        daemon.ask("policy", **fields)
    assert daemon.ask("policy") == before


def test_where_the_images_went(daemon):
    content = [picture(5), picture(6), picture(5), text_part("What is it?")]
    first = daemon.chat(content)
    told = daemon.ask("explain", request=first["id"])
    assert [image["source"] for image in told["images"]] == ["encoded", "encoded", "repeated"]
    assert all(image["hand_overs"][0]["seconds"] > 0 for image in told["images"])
    assert told["tokens"] == first["usage"]["prompt_tokens"] and told["pd"] == "pd/0"
    times = [told[name] for name in ("began_at_s", "embedded_at_s", "prefilled_at_s", "ended_at_s")]
    assert times == sorted(times) and 0 < times[0] and times[-1] < 60
    again = daemon.ask("explain", request=daemon.chat(content)["id"])
    assert [image["source"] for image in again["images"]] == ["cache"] * 3
    listed = daemon.ask("explain")
    assert [each["id"] for each in listed[:2]] == [again["id"], first["id"]]
    shown = epdctl(daemon, "explain", first["id"])
    assert shown.returncode == 0 and "done" in shown.stdout.splitlines()[-1]
    missing = epdctl(daemon, "explain", "chatcmpl-none")
    assert missing.returncode == 1 and "no request 'chatcmpl-none'" in missing.stderr


def test_the_shares_of_the_work_are_whole(daemon):
    daemon.say([*map(picture, range(7, 15)), text_part("List the images in order.")])
    encoders = [worker for worker in daemon.status()["workers"] if worker["role"] == "encoder"]
    assert sum(worker["share"] for worker in encoders) == pytest.approx(1)
    assert all(worker["share"] > 0.1 and worker["slowness"] > 0 and not worker["slow"] for worker in encoders)
    assert daemon.worker("pd/0")["share"] is None


def test_a_killed_encoder_is_named(daemon):
    pid = daemon.worker("encoder/0")["pid"]
    os.kill(pid, signal.SIGSTOP)        # what it is given now, it loses
    body = {"messages": [{"role": "user", "content": [*map(picture, range(15, 19)), text_part("What is it?")]}]}
    with ThreadPoolExecutor(1) as pool:
        ask = pool.submit(daemon.request, urllib.request.Request(
            daemon.url("/v1/chat/completions"), json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Request-ID": "the-lost-one"}))
        daemon.wait(lambda status: status["workers"][0]["in_flight"] > 0, 120)
        os.kill(pid, signal.SIGKILL)
        assert ask.result()[0] == 200
    told = daemon.ask("explain", request="the-lost-one")
    lost = [each for image in told["images"] for each in image["hand_overs"] if each["outcome"] == "lost"]
    assert lost and all(each["worker"] == "encoder/0" and "signal 9" in each["error"] for each in lost)
    assert told["outcome"] == "completed"
    assert all(image["hand_overs"][-1]["outcome"] == "encoded" for image in told["images"])
