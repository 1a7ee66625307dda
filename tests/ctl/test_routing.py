"""`epdctl policy` and `epdctl explain`."""

import json
import subprocess
from pathlib import Path

import pytest

from epdd.ctl import routing
from epdd.ctl.main import main
from epdd.settings.workers import POLICIES
from tests.ctl.fake_daemon import FakeDaemon
from tests.ctl.snapshot import snapshot

ROUTER = snapshot()["router"] | {"policies": POLICIES}


def hand_over(worker, outcome="encoded", **values):
    return {"worker": worker, "reason": "least in flight", "handed_over_at_s": 0.1, "waited_s": 0.0854,
            "predicted_s": 0.412, "seconds": 0.455 if outcome == "encoded" else None, "outcome": outcome, "error": "",
            "ended_at_s": 0.6} | values


def image(source, *hand_overs, error=""):
    return {"patches": 2040, "source": source, "error": error, "hand_overs": list(hand_overs)}


def request(*images, **values):
    return {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef", "client_id": "", "age_s": 34.2, "tokens": 8231,
        "outcome": "completed", "code": "", "error": "", "images_count": len(images), "seconds": 2.5, "pd": "pd/0",
        "began_at_s": 0.031,
        "embedded_at_s": 1.5, "prefilled_at_s": 1.9, "ended_at_s": 2.5, "images": list(images),
        "placements": [{"worker": "pd/0", "placed_at_s": 1.5, "error": "", "prefilled_at_s": 1.9}]} | values


LOST = "encoder/1 was lost (killed by signal 9 (by an operator, the stall detector or the kernel's OOM killer))"
ALL = request(
    image("encoded", hand_over("encoder/0")), image("cache"), image("joined", hand_over("encoder/10")),
    image("encoded", hand_over("encoder/1", "lost", error=LOST), hand_over(
        "encoder/0", "running", ended_at_s=None,
        reason="finishes first: faster ones have 24480 patches before it")),
    client_id="mine")


@pytest.fixture
def daemon(tmp_path):
    with FakeDaemon(tmp_path / "admin.sock", {"policy": ROUTER, "explain": ALL}) as made:
        yield made


def epdctl(daemon, *argv):
    return main(["--socket", daemon.server_address, *argv])


def test_the_policy_in_force(daemon, capsys):
    assert epdctl(daemon, "policy") == 0
    assert daemon.asked == [{"verb": "policy"}]
    assert capsys.readouterr().out == f"""\
policy    budget
unit      patch
slack     1
R         6.21 measured

* budget        {POLICIES['budget']}
  earliest      {POLICIES['earliest']}
  least-loaded  {POLICIES['least-loaded']}
  round-robin   {POLICIES['round-robin']}
  gpu-only      {POLICIES['gpu-only']}
"""
    assert max(len(f"* least-loaded  {text}") for text in POLICIES.values()) <= 100


@pytest.mark.parametrize("argv, asked", [
    (["earliest"], {"policy": "earliest"}), (["--unit", "image"], {"unit": "image"}),
    (["budget", "--unit", "patch", "--ratio", "6"], {"policy": "budget", "unit": "patch", "ratio": 6.0}),
    (["--ratio", "auto", "--slack", "0"], {"ratio": "auto", "slack": 0.0})])
def test_only_what_is_said_is_changed(daemon, capsys, argv, asked):
    assert epdctl(daemon, "policy", *argv) == 0
    assert daemon.asked == [{"verb": "policy", **asked}]
    assert "until the daemon reloads" in capsys.readouterr().out


@pytest.mark.parametrize("ratio", ["0", "-1", "inf", "nan", "six"])
def test_a_ratio_is_auto_or_above_zero(daemon, capsys, ratio):
    with pytest.raises(SystemExit) as stop:
        epdctl(daemon, "policy", f"--ratio={ratio}")
    assert stop.value.code == 2 and daemon.asked == []
    assert "neither auto nor a number above 0" in capsys.readouterr().err


def test_the_daemons_refusal_names_what_is_allowed(daemon, capsys):
    daemon.answers["policy"] = ValueError("router.policy is 'fast'; allowed: budget, earliest")
    assert epdctl(daemon, "policy", "fast") == 1
    assert capsys.readouterr().err == "epdctl: router.policy is 'fast'; allowed: budget, earliest\n"


def test_a_request_explained(daemon, capsys):
    assert epdctl(daemon, "explain", "mine") == 0
    assert daemon.asked == [{"verb": "explain", "request": "mine"}]
    out = capsys.readouterr().out
    assert out == """\
chatcmpl-0123456789abcdef0123456789abcdef  x-request-id mine
completed, arrived 34 s ago; 4 images, 8231 tokens of prompt

IMAGE  PATCHES  SOURCE   ENCODER     WAITED  PREDICTED  TOOK      ENDED  WHY
    0     2040  encoded  encoder/0    85 ms     412 ms  455 ms   600 ms  least in flight
    1     2040  cache    -                -          -  -             -  its embedding was there
    2     2040  joined   encoder/10   85 ms     412 ms  455 ms   600 ms  least in flight
    3     2040  encoded  encoder/1    85 ms     412 ms  lost     600 ms  least in flight; encoder/1
                                                                         was lost (killed by signal
                                                                         9 (by an operator, the
                                                                         stall detector or the
                                                                         kernel's OOM killer))
                         encoder/0    85 ms     412 ms  running       -  finishes first: faster ones
                                                                         have 24480 patches before
                                                                         it

    0 ms  arrived
   31 ms  images fetched, prompt made
  1.50 s  embeddings ready
  1.50 s  given to pd/0
  1.90 s  prefilled by pd/0
  2.50 s  done
"""
    assert max(map(len, out.splitlines())) <= 100
    assert epdctl(daemon, "explain", "mine", "--json") == 0
    assert json.loads(capsys.readouterr().out) == ALL


def test_a_running_request_shows_what_it_waits_for():
    text = routing.explanation(request(
        image("encoded"), outcome="running", embedded_at_s=None, prefilled_at_s=None, ended_at_s=None, placements=[]))
    assert "running, arrived 34 s ago; 1 image," in text and "waits in the queue" in text
    assert text.endswith("\n   31 ms  images fetched, prompt made")


def test_a_failed_request_says_why_and_which_image():
    text = routing.explanation(request(
        image("encoded", hand_over("encoder/0", "failed", error="damaged"), error="damaged"),
        image("encoded", hand_over("encoder/0"), error="an answer that does not fit"), image("encoded"),
        outcome="failed", code="invalid_image", error="damaged", embedded_at_s=None, placements=[]))
    lines = text.splitlines()
    assert lines[2] == "invalid_image: damaged" and lines[-1] == "  2.50 s  failed"
    assert lines[5].endswith("failed  600 ms  least in flight; damaged")
    assert lines[7].strip() == "an answer that does not fit"
    assert lines[8].endswith("left the queue unencoded")


def test_a_pd_worker_in_vain():
    first = {"worker": "pd/0", "placed_at_s": 1.5, "error": "pd/0 was lost (exit code 1)", "prefilled_at_s": None}
    second = {"worker": "pd/1", "placed_at_s": 1.7, "error": "", "prefilled_at_s": 1.9}
    lines = routing.explanation(request(placements=[first, second])).splitlines()
    assert lines[-5:] == ["  1.50 s  embeddings ready", "  1.50 s  given to pd/0, in vain: pd/0 was lost (exit code 1)",
                          "  1.70 s  given to pd/1", "  1.90 s  prefilled by pd/1", "  2.50 s  done"]


def test_the_last_requests(daemon, capsys):
    made = [{"id": f"chatcmpl-{i:032}", "client_id": "", "age_s": 10.0 * i, "tokens": 90, "outcome": "completed",
             "code": "", "images_count": i, "seconds": 0.25, "pd": "pd/0"} for i in range(30)]
    made[1] |= {"outcome": "failed", "code": "worker_lost", "client_id": "a-name-of-more-than-twenty-letters"}
    daemon.answers["explain"] = made
    assert epdctl(daemon, "explain", "-n", "2") == 0
    assert daemon.asked == [{"verb": "explain"}]
    out = capsys.readouterr().out
    assert out == """\
REQUEST                                     AGE  IMAGES  OUTCOME        TOOK  PD    X-REQUEST-ID
chatcmpl-00000000000000000000000000000000   0 s       0  completed    250 ms  pd/0
chatcmpl-00000000000000000000000000000001  10 s       1  worker_lost  250 ms  pd/0  a-name-of-more-tha..
"""
    assert epdctl(daemon, "explain") == 0
    assert len(capsys.readouterr().out.splitlines()) == 21
    daemon.answers["explain"] = []
    assert epdctl(daemon, "explain") == 0
    assert capsys.readouterr().out == "no request yet\n"


@pytest.mark.parametrize("count", ["0", "-3", "many"])
def test_a_list_has_a_length(daemon, count):
    with pytest.raises(SystemExit) as stop:
        epdctl(daemon, "explain", "-n", count)
    assert stop.value.code == 2


def completed(words, place):
    script = Path(__file__).parents[2] / "etc" / "completion.bash"
    code = (f"source {script}; COMP_WORDS=({words}); COMP_CWORD={place}; _epdctl; "
            "printf '%s\\n' \"${COMPREPLY[@]}\"")
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_completion():
    assert {"policy", "explain"} <= set(completed("epdctl ''", 1))
    assert set(POLICIES) <= set(completed("epdctl policy ''", 2))
    assert completed("epdctl policy --unit ''", 3) == ["request", "image", "patch"]
    assert {"--json", "-n"} <= set(completed("epdctl explain -", 2))
