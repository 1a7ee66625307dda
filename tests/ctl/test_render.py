import re

import pytest

from epdd.ctl import render
from tests.ctl.snapshot import snapshot, worker


def test_the_whole_screen():
    assert render.status(snapshot()) == """\
epdd 0.1.0  degraded  Qwen3-VL-8B (qwen3_vl)  http://0.0.0.0:8765  up 5 h 12 min

WORKER     DEVICE  NUMA  CPUS          STATE        IN FLIGHT        RATE   DONE   MEMORY  SHARE/KV
encoder/0  cuda:0     0  1-2           READY        3 (12.3k)  31.4 img/s  81.2k    3 GiB       67%
encoder/1  cpu        0  4-15          READY        1 (4096)   5.21 img/s    12k  900 MiB       11%
encoder/2  cpu        1  17,19,21,2..  3.1x slower  0           4.8 img/s   9012  900 MiB       10%
encoder/3  cpu        2  -             weights 42%  0                   -      0  300 MiB         -
encoder/4  cpu        3  49-63         READY        1 (2040)    5.3 img/s  11.9k  900 MiB       12%
pd/0       cuda:1     0  0             READY        8 (8512)    812 tok/s    30k    5 GiB       22%
pd/1       cuda:2     1  16            READY        9 (8512)    812 tok/s    30k    5 GiB       44%
pd/2       cuda:3     2  32            READY        10 (8512)   812 tok/s    30k    5 GiB       67%
pd/3       cuda:4     3  48            READY        11 (8512)   812 tok/s    30k    5 GiB       89%

router    policy budget, in flight counted by patch, slack 1, R 6.21 measured
pools     I_cpu 6136  B_cpu 7911  I_gpu 12.3k  N_cpu 4  N_gpu 1
queue     3 images waiting, 6120 patches; the oldest for 1.24 s
arena     3 GiB of 4 GiB used: 700 MiB in use, 2.3 GiB cached; 211 leases, 0 waiting
handover  encoder/0: 1 GiB of 4 GiB used of its GPU's memory, 512 MiB cached
handover  encoder/0 to pd/0, pd/1, pd/2, pd/3 by its GPU's memory
memory    arena: 3 GiB in huge pages; KV: 200k of 360k tokens used, 16k kept for prompts to come
cache     184 images, 2.3 GiB of 4 GiB
lookups   51.2k hits (31%), 114.2k misses, 312 joined, 113k evicted
requests  38 running, 120k completed, 3 failed, 212 rejected, 91 aborted
latency   p50 2.31 s, p90 5.02 s, p99 11 s;  first token p50 412 ms, p90 950 ms, p99 2.10 s
rate      3250 tokens/s, 46.7 images/s

! encoder/2: memory not bound to NUMA node 1: Operation not permitted; set_mempolicy may need
  CAP_SYS_NICE
! encoder/2 is 3.1x slower than at its start
! encoder/2 restarted 2 times"""


def test_before_anything_is_known():
    """Right after the start: no worker is ready, nothing is measured."""
    blank = snapshot(state="starting", why=[], workers=[worker("pd/0", state="GONE", cpus=None, pid=None,
                                                               rss_bytes=None, in_flight=None)])
    blank["router"] |= {"ratio": None, "ratio_source": "none", "budget_cpu": None}
    blank["requests"] |= {"latency_s": {"p50": None, "p90": None, "p99": None, "count": 0}, "ttft_s": None,
                          "tokens_per_s": None}
    text = render.status(blank)
    assert "slack 1, R -\n" in text and "I_cpu 6136  B_cpu -" in text
    assert "latency   -;  first token -" in text


@pytest.mark.parametrize("answers, scale, line", [
    ("rows", 1.0, "emulated  devices by profile box; no model: answers mean nothing"),
    ("demo", 2.5, "emulated  devices by profile box, 2.5 times as fast as it says; true answers")])
def test_emulated_devices_are_told_first(answers, scale, line):
    made = snapshot(emulated={"profile": "box", "about": "a box", "answers": answers, "scale": scale})
    lines = render.status(made).splitlines()
    assert lines[lines.index(line) + 1].startswith("router ")


@pytest.mark.parametrize("policy, shown", [("bind:2", "bind:2"), ("default", "1"), (None, "1")])
def test_the_memory_policy_in_force_is_shown(policy, shown):
    assert render.worker_cells(worker("pd/0", numa_node=1, mem_policy=policy))[2] == shown


@pytest.mark.parametrize("values, shown", [
    ({"ratio_set": 8.0, "ratio": 8.0}, "8 set, 6.21 measured"), ({}, "6.21 measured"),
    ({"ratio_set": 8.0, "ratio": 8.0, "ratio_measured": None}, "8 set"), ({"ratio": None}, "-")])
def test_the_ratio_as_set_and_as_measured(values, shown):
    assert render.ratio(snapshot()["router"] | values) == shown


def test_an_empty_queue_has_no_oldest():
    lines = dict(render.facts(snapshot(router=snapshot()["router"] | {"queue_jobs": 0, "queue_cost": 0})))
    assert lines["queue"] == "0 images waiting, 0 patches"


def test_only_a_worker_that_takes_work_is_called_slow():
    states = [render.state_text(worker("encoder/0", state=state, slow=True, slowness=2.26)) for state in (
        "READY", "DRAINING")]
    assert states == ["2.3x slower", "DRAINING"]


def test_the_list_of_cpus_gives_way_to_the_rest():
    wide = worker("encoder/12", device="cuda:11", cpus=list(range(0, 40, 2)), mem_policy="bind:0-1", in_flight=12,
                  in_flight_cost=123_456, rate_per_s=31.25, share=0.9, rss_bytes=12_600 << 20)
    lines = render.status(snapshot(workers=[wide])).splitlines()
    assert max(map(len, lines)) <= 100
    assert re.search(r"bind:0-1  0,2,\S*\.\.  READY  12 \(123.5k\)  31.2 img/s +0  12.3 GiB +90%$", lines[3])


def test_reasons_beyond_the_table_are_shown():
    why = ["encoder/3 STARTING", "pd/0 FAILED: exit code 78: no memory"]
    assert render.notes(snapshot(why=why, workers=[worker("encoder/3", state="STARTING")])) == why[1:]


def test_what_is_refused_since_workers_died_over_it_is_shown():
    poison = {"entries": 2, "images": 5, "prompts": 0, "refused": 9}
    assert render.notes(snapshot(why=[], workers=[], poison=poison)) == [
        "content over which two workers died is refused: 2 images or prompts"]
    assert render.notes(snapshot(why=[], workers=[], poison=poison | {"entries": 0})) == []


def test_colour_changes_nothing_else():
    plain, painted = render.status(snapshot()), render.status(snapshot(), colour=True)
    assert "\x1b[33mdegraded\x1b[0m" in painted
    for code in ("0", *render._CODES.values()):
        painted = painted.replace(f"\x1b[{code}m", "")
    assert painted == plain


@pytest.mark.parametrize("seconds, text", [(0.0854, "85 ms"), (1.239, "1.24 s"), (75.2, "75 s"), (None, "-")])
def test_seconds(seconds, text):
    assert render.seconds(seconds) == text


@pytest.mark.parametrize("seconds, text", [
    (42.9, "42 s"), (200, "3 min"), (18_732, "5 h 12 min"), (700_000, "8 d 2 h"), (None, "-")])
def test_duration(seconds, text):
    assert render.duration(seconds) == text


@pytest.mark.parametrize("value, text", [
    (0, "0"), (817, "817"), (9012, "9012"), (12_440, "12.4k"), (3_100_000, "3.1M"), (2e9, "2G"), (None, "-")])
def test_quantity(value, text):
    assert render.quantity(value) == text


@pytest.mark.parametrize("value, text", [(0, "0"), (0.4123, "0.412"), (6.21, "6.21"), (417.3, "417"), (12345, "12.3k")])
def test_number(value, text):
    assert render.number(value) == text


@pytest.mark.parametrize("value, text", [(0, "0 B"), (1536, "1.5 KiB"), (512 << 20, "512 MiB"), (5 << 39, "2.5 TiB")])
def test_size(value, text):
    assert render.size(value) == text


def test_encoding_tells_each_outcome_once() -> None:
    trials = [{"backend": "torch", "seconds": 0.16, "note": ""}, {"backend": "prepacked", "seconds": 0.142, "note": ""},
              {"backend": "ipex", "seconds": 0.0, "note": "not installed"},
              {"backend": "int8", "seconds": 0.07, "note": "cosine 0.9321, at least 0.99 needed"}]
    alike = [{"name": f"encoder/{i}", "backend": "prepacked", "trials": trials} for i in range(3)]
    assert render.encoding([*alike, {"name": "encoder/3", "backend": "torch", "trials": []}, {"name": "pd/0"}]) == [
        "prepacked in encoder/0; one block: int8 70 ms (refused), prepacked 142 ms, torch 160 ms",
        "torch in encoder/3"]
