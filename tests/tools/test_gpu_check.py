"""tools/gpu_check without a GPU: every part runs, and one that fails is a row and stops no other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.daemon import ROOT
from tools.gpu_check import __main__ as gpu_check

pytestmark = pytest.mark.takes(60)


@pytest.mark.slow
def test_the_rehearsal_without_a_gpu_passes(tmp_path):
    ended = subprocess.run([sys.executable, "-m", "tools.gpu_check", "--cpu", "--out", tmp_path], capture_output=True,
                           text=True, cwd=ROOT, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith((tmp_path / "table.txt").read_text())
    rows = {(row["part"], row["what"]): row["value"] for row in json.loads((tmp_path / "rows.json").read_text())}
    assert {part for part, _ in rows} == {part for part, _ in gpu_check.PARTS}
    assert rows["correct", "qwen3_vl float32"] == "6 of 6"
    assert rows["correct", "qwen3_vl bfloat16"] > 90
    assert rows["correct", "embedding float32"] < 1e-5 and 0 < rows["correct", "embedding bfloat16"] < 0.1
    assert rows["handover", "CUDA IPC opened"] == "yes"
    for key in (("handover", "host arena"), ("handover", "CUDA IPC"), ("decode", "batch 1"), ("decode", "batch 4"),
                ("encoder", "448 px"), ("serve", "TTFT"), ("ratio", "R at 448 px")):
        assert rows[key] > 0, key


def test_a_part_that_fails_or_takes_too_long_is_a_row(tmp_path):
    rows = gpu_check.run("no such part", 60, tmp_path, tmp_path, tmp_path, cpu=True)
    assert [row["what"] for row in rows] == ["FAILED"] and "invalid choice" in rows[0]["note"]
    (tmp_path / "decode.jsonl").write_text(json.dumps(
        {"part": "decode", "what": "memory", "value": 4.0, "unit": "GB/s", "note": ""}) + "\n")
    rows = gpu_check.run("decode", 0.01, tmp_path, tmp_path, tmp_path, cpu=True)
    assert [row["what"] for row in rows] == ["memory", "FAILED"] and "took longer" in rows[1]["value"]
    assert gpu_check.table(rows).splitlines()[0].split() == ["decode", "memory", "4", "GB/s"]


def test_what_a_machine_lacks_is_all_that_epdd_needs_but_what_it_brings():
    """A requirement of setup.cfg that is neither expected nor installed would end every part."""
    import configparser
    import re

    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    needed = {re.split(r"[<>=]", line)[0] for line in config["options"]["install_requires"].split()}
    there = {"torch", "transformers", "huggingface_hub", "aiohttp", "uvloop"}     # the third comes with the second
    assert needed - there <= set(gpu_check.WHEELS.values())


def test_wheels_that_do_not_fit_keep_no_others_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "WHEELS", {"not_there_a": "not-there-a", "json": "json"})
    assert gpu_check.missing() == ["not-there-a"]
    gpu_check.install(tmp_path, tmp_path / "site")
    assert "not-there-a" in capsys.readouterr().out and not Path(tmp_path / "site").exists()
