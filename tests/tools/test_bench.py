"""The benchmarks' arithmetic, and their random checkpoint."""

import importlib.util

import numpy as np
import pytest

from epdd import families
from tools import random_model
from tools.bench.report import Report
from tools.bench.serving import linear, serve_tables


def test_a_line_is_found_and_a_curve_is_none():
    counts = linear.powers(32)
    assert counts == [1, 2, 4, 8, 16, 32]
    straight = [(n, 0.5 + 0.25 * n) for n in counts]
    assert linear.line(straight) == pytest.approx((0.5, 0.25, 1.0))
    curved = [(n, 0.01 * n ** 2) for n in counts]
    assert linear.exponent(curved) == pytest.approx(2.0) and linear.line(curved)[2] < 0.9
    # A fixed cost makes it look flatter, never steeper.
    assert 0.7 < linear.exponent(straight) < 1.0


def point(server, rate, tpot_p99, throughput, at_once=0):
    shares = {share: 10.0 for share in ("p50", "p90", "p99")}
    return {"server": server, "rate": rate, "at_once": at_once, "done": 30, "errors": 0, "seconds": 100.0,
            "load": {"images": 4, "width": 448, "height": 448, "isl": 128, "osl": 64}, "ttft": shares, "gap": shares,
            "latency": {share: 4 * tpot_p99 for share in shares},
            "tpot": {**shares, "p99": tpot_p99}, "requests_per_s": {"avg": throughput}, "tokens_per_s": {"avg": 6.4},
            "client_cpu_s": 10.0, "client_wall_s": 100.0}


def test_servers_side_by_side(tmp_path, capsys):
    report = Report(tmp_path)
    serve_tables.write(report, [point("other", 0.1, 80.0, 0.08), point("epdd", 0.1, 20.0, 0.1),
                                point("epdd", 0.0, 40.0, 0.3, at_once=8), point("other", 0.2, 90.0, 0.1)], "epdd")
    latencies, _, ratios, most = report._numbers["tables"]
    assert [row[:2] for row in latencies["rows"]] == [["epdd", "0.1"], ["epdd", "8 at once"], ["other", "0.1"],
                                                      ["other", "0.2"]]
    assert latencies["rows"][0][3] == "10.0 / 10.0 / 20.0"
    # Only where both were measured.
    assert ratios["rows"] == [["other", "0.1", 1.0, 0.25, 1.0, 1.0, 1.0, 0.25, pytest.approx(1.25)]]
    assert most["rows"] == [["epdd", 0.3, 1.0], ["other", 0.1, pytest.approx(3.0)]]
    assert (tmp_path / "serve.png").exists() == bool(importlib.util.find_spec("matplotlib"))
    assert "0.10 CPUs" in serve_tables.line(point("epdd", 0.1, 20.0, 0.1))


def test_a_random_model_speaks_for_ever(tmp_path):
    from tests.models import checkpoints

    folder = str(random_model.build(tmp_path / "model", random_model.SHAPES["tiny"]))
    family = families.load(folder)
    assert family.rows(family.grid(448, 448)) == 196 and family.max_model_len == 16384
    image = checkpoints.picture(64, 64)
    _, grids = checkpoints.pixel_values(folder, [image])
    rows = family.rows(tuple(grids[0].tolist()))
    prompt = [5, 6, *[family.image_token_id] * rows, 7]
    answer = checkpoints.reference_generate(folder, prompt, [image], 48)
    said = set(random_model.printable(checkpoints.transformers.AutoTokenizer.from_pretrained(folder).get_vocab()))
    assert len(answer) == 48 and set(answer) <= said and not set(answer) & set(family.eos_ids)
    assert len(set(answer)) > 8
    # Its answer depends on the picture.
    other = checkpoints.reference_generate(folder, prompt, [checkpoints.picture(64, 64, seed=1)], 48)
    assert other != answer
    assert np.isfinite(answer).all()
