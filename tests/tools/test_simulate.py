"""The simulator's command line, its fleets, mixes and traces, and sums worked out by hand."""

import json
import math
import subprocess
import sys

import pytest

from epdd.emulation import profile
from tools.bench import live
from tools.simulate import __main__ as program, scenarios
from tools.simulate.comparison import BY_NAME, PUBLISHED_IMAGE, PUBLISHED_REQUEST
from tools.simulate.simulator import Request, Rule, percentile, simulate


def latencies(fleet, images, rule):
    """Of one request at time 0."""
    return simulate(scenarios.fleet(fleet), [Request(0.0, (8160,) * images)], rule).latencies


@pytest.mark.parametrize("rule, seconds", [
    ("gpu-only", 8 * 0.11),
    ("earliest", 8 * 0.11),                     # a CPU would be done at 1.32
    ("round-robin", 2 * 1.32),                  # GPU, four CPUs, GPU, two CPUs again
    ("earliest finish, early binding", 8 * 0.11)])
def test_one_request_of_eight(rule, seconds):
    assert latencies(scenarios.TABLE_FLEET, 8, BY_NAME[rule]) == pytest.approx([seconds])


def test_the_published_rule_by_hand():
    # Image by image, I_gpu 0: GPU; B = 1/3 > 0: CPU; 1 >= 1/3, 2/3, 3/3: GPU until I_gpu = 4, B = 4/3: CPU; GPU, GPU.
    outcome = simulate(scenarios.fleet(scenarios.TABLE_FLEET), [Request(0.0, (8160,) * 8)], PUBLISHED_IMAGE)
    assert outcome.images_by(["encoder/0"]) == 6 and outcome.latencies == pytest.approx([1.32])
    # Whole requests: the first to the GPU (0.88 s), the second to a CPU (8 images one after another).
    outcome = simulate(scenarios.fleet(scenarios.TABLE_FLEET), [Request(0.0, (8160,) * 8), Request(0.1, (8160,) * 8)],
                       PUBLISHED_REQUEST)
    assert outcome.latencies == pytest.approx([0.88, 8 * 1.32])


def test_earliest_uses_cpus_for_what_the_gpu_would_not_finish_sooner():
    # Twelve images take the GPU 1.32 s: of sixteen, twelve go to it and one to each CPU.
    outcome = simulate(scenarios.fleet(scenarios.TABLE_FLEET), [Request(0.0, (8160,) * 16)], BY_NAME["earliest"])
    assert outcome.images_by(["encoder/0"]) == 12 and outcome.latencies == pytest.approx([1.32])


def test_fleets_from_the_command_line_and_from_profiles():
    fleet = scenarios.fleet("gpu:1@0.01/1e-5, cpu:2@0.1/1e-4/1e-9x3after60~0.2")
    assert [encoder.name for encoder in fleet] == ["encoder/0", "encoder/1", "encoder/2"]
    assert fleet[0].group.image_seconds(1000) == pytest.approx(0.02)
    assert fleet[2].group.image_seconds(1000) == pytest.approx(0.201)
    assert fleet[2].group.jitter == 0.2 and fleet[2].group.slowness(59) == 1 and fleet[2].group.slowness(61) == 3
    shipped = scenarios.fleet("router-table")
    assert [(e.group.kind, e.group.image_seconds(9)) for e in shipped] == [("gpu", 0.11)] + [("cpu", 1.32)] * 4
    with pytest.raises(SystemExit, match="tpu:1@3"):
        scenarios.fleet("tpu:1@3")


def test_a_benchmarks_profile_is_the_fleet_again(tmp_path):
    fleet = scenarios.fleet("gpu:1@0.01/1e-5,cpu:2@0.1/1e-4/1e-9x3after60~0.2")
    (tmp_path / "profile.toml").write_text(live.profile(fleet, 10.0))
    read = profile.read(str(tmp_path / "profile.toml"))
    again = scenarios.fleet(str(tmp_path / "profile.toml"))
    assert read.scale == 10 and [encoder.name for encoder in again] == [encoder.name for encoder in fleet]
    for one, other in zip(fleet, again):
        assert (one.group.kind, one.group.seconds, one.group.jitter, one.group.slow) == (
            other.group.kind, other.group.seconds, other.group.jitter, other.group.slow)


def test_sizes_are_cut_as_the_model_cuts_them():
    assert [scenarios.patches(*size) for size in ((1920, 1080), (3840, 2160), (224, 224))] == [
        120 * 68, 240 * 136, 16 * 16]


def test_arrivals_are_the_same_for_all_rates_and_mixes():
    slow, fast = (scenarios.poisson(rate, 50, scenarios.equal(1), seed=3) for rate in (1, 2))
    assert [request.at for request in slow] == pytest.approx([2 * request.at for request in fast])
    mixed = scenarios.poisson(1, 50, scenarios.mixed(1, 8, text_share=0.5), seed=3)
    assert [request.at for request in mixed] == [request.at for request in slow]
    assert any(not request.images for request in mixed) and max(len(request.images) for request in mixed) <= 8
    assert [tuple(scenarios.patches(*size) for size in sizes) for sizes in scenarios.draws(
        scenarios.mixed_sizes(1, 8, text_share=0.5), 50, 3)] == [request.images for request in mixed]
    bursts = scenarios.poisson(1, 40, scenarios.equal(1), seed=3, burst=4)
    assert len({request.at for request in bursts}) == 10 and len(bursts) == 40
    gaps = scenarios.poisson(2, 4000, scenarios.equal(1), seed=1)
    assert len(gaps) / gaps[-1].at == pytest.approx(2, rel=0.1)


def test_a_recorded_trace(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 2.5, "images": [[1920, 1080], [224, 224]]}\n{"at": 1, "images": []}\n')
    assert scenarios.recorded(trace) == [Request(1.0, ()), Request(2.5, (8160, 256))]
    trace.write_text('{"at": 1}\n')
    with pytest.raises(SystemExit, match="trace.jsonl:1"):
        scenarios.recorded(trace)


def test_nearest_rank():
    assert percentile(range(1, 201), 0.99) == 198 and percentile(range(1, 201), 0.5) == 100
    assert percentile([7.0], 0.99) == 7.0 and percentile([], 0.5) == 0.0


def test_a_slow_encoder_is_found_out():
    fleet = scenarios.fleet("gpu:1@0.1,cpu:1@1x3after20")
    requests = [Request(0.5 * i, (8160,) * 8) for i in range(120)]
    outcome = simulate(fleet, requests, Rule("rule", "budget", "image"))
    assert program.recovered(outcome, 20.0, 30.0) < 30 and outcome.ratios[-1][1] == pytest.approx(30)
    assert program.recovered(outcome, 20.0, 99.0) == math.inf


def test_what_pays_in_a_sentence():
    said = program.worth([10.0, 8.0, 6.0, 4.0, 3.96, 3.9], 1.2, here=3)
    assert said == ("1.2 requests/s: 3 CPU encoders cut p99 from 10.00 s to 4.00 s, one more another 1%; "
                    "beyond 3 they bring less than 5% each.")
    assert program.worth([10.0, 9.9, 9.8], 1.2).endswith("beyond 0 they bring less than 5% each.")
    assert program.worth([10.0, 5.0, 2.0], 1.2).endswith("up to 2 they bring at least 5% each.")


def test_the_command_line_leaves_numbers_and_plots(tmp_path):
    pytest.importorskip("matplotlib")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"at": i, "images": [[1920, 1080]] * 8}) for i in range(10)))
    ran = subprocess.run([sys.executable, "-m", "tools.simulate", "run", "--fleet", "router-table", "--jobs", "1",
                          "--trace", str(trace), "--policies", "earliest", "gpu-only", "--out", str(tmp_path / "out")],
                         capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "0.88 / 0.88 / 0.88 / 0.88" in ran.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["numbers.json", "run.png", "run.svg"]
    numbers = json.loads((tmp_path / "out" / "numbers.json").read_text())
    assert numbers["tables"][0]["rows"][0] == ["earliest", pytest.approx([0.88] * 4)]
