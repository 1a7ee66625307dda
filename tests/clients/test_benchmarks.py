"""Load generators against the real daemon, with pictures and streams: none of their requests may fail."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys

import aiohttp
import pytest

from tests.clients import venvs
from tests.e2e.daemon import ROOT

TOKENIZER = ROOT / "epdd" / "demo"
REQUESTS, TOKENS, IMAGES = 6, 24, 2


def measured(command, tmp_path):
    # Offline, aiperf treats a tokenizer's folder as a name in the hub's cache.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment["PYTHONPATH"] = str(ROOT)
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=180, cwd=tmp_path,
                           stdin=subprocess.DEVNULL, env=environment)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"


def test_aiperf(installed, daemon, tmp_path):
    measured([
        installed("aiperf") / "bin" / "aiperf", "profile", "--model", "epdd-demo", "--url", daemon.url(""),
        "--endpoint-type", "chat", "--streaming", "--tokenizer", TOKENIZER, "--concurrency", 2,
        "--request-count", REQUESTS, "--num-dataset-entries", REQUESTS, "--isl", 64, "--osl", TOKENS,
        "--image-batch-size", IMAGES, "--image-width-mean", 320, "--image-height-mean", 240, "--image-format", "jpeg",
        "--extra-inputs", "ignore_eos:true", "--random-seed", 3, "--ui", "none",
        "--output-artifact-dir", tmp_path / "out"], tmp_path)
    summary = json.loads(next(tmp_path.rglob("profile_export_aiperf.json")).read_text())
    assert summary["aiperf_version"] == "0.13.0" and not summary["error_summary"]
    assert summary["request_count"]["avg"] == REQUESTS and "error_request_count" not in summary
    assert summary["num_images"]["avg"] == IMAGES
    assert summary["total_usage_completion_tokens"]["avg"] == REQUESTS * TOKENS
    # Template and image rows come on top of its 64 tokens.
    assert summary["usage_prompt_tokens"]["min"] == 64 + 8 + IMAGES * 32
    # It reads /metrics beside the requests.
    metrics = json.loads(next(tmp_path.rglob("server_metrics_export.json")).read_text())
    assert any(name.startswith("epdd_") for name in metrics["metrics"])


def test_bench_serve(installed, daemon, tmp_path):
    """tools/bench/serving/serve.py, which runs aiperf: one server, one rate, then the table of results."""
    program = [sys.executable, "-m", "tools.bench.serving.serve"]
    measured([
        *program, "run", "--aiperf", installed("aiperf") / "bin" / "aiperf", "--url", daemon.url(""),
        "--name", "epdd", "--model", TOKENIZER, "--rates", 4, "--requests", REQUESTS, "--warm-up", 0,
        "--images", IMAGES, "--width", 320, "--height", 240, "--isl", 64, "--osl", TOKENS,
        "--extra", '{"ignore_eos": true}', "--out", tmp_path], tmp_path)
    measured([*program, "compare", tmp_path], tmp_path)
    point, = json.loads((tmp_path / "numbers.json").read_text())["points"]
    assert (point["server"], point["rate"], point["done"], point["errors"]) == ("epdd", 4, REQUESTS, 0)
    assert point["osl"]["avg"] == TOKENS and 0 < point["tpot"]["p50"] <= point["tpot"]["p99"]
    ttft, tpot, latency = (point[name]["avg"] for name in ("ttft", "tpot", "latency"))
    assert latency == pytest.approx(ttft + (TOKENS - 1) * tpot, rel=0.01)
    assert (tmp_path / "serve.png").exists() == bool(importlib.util.find_spec("matplotlib"))


def test_vllm_bench_serve(installed, daemon, tmp_path):
    measured([
        installed("vllm") / "bin" / "python", venvs.PROGRAMS / "with_vllm.py", "--backend", "openai-chat",
        "--endpoint", "/v1/chat/completions", "--base-url", daemon.url(""), "--tokenizer", TOKENIZER,
        "--dataset-name", "random-mm", "--num-prompts", REQUESTS, "--random-input-len", 40,
        "--random-output-len", TOKENS, "--random-mm-base-items-per-request", IMAGES,
        "--random-mm-bucket-config", "{(128, 160, 1): 1.0}",
        "--random-mm-limit-mm-per-prompt", '{"image": 3, "video": 0}', "--ignore-eos", "--max-concurrency", 2,
        "--save-result", "--save-detailed", "--result-filename", "result.json"], tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["errors"]) == (REQUESTS, 0, [""] * REQUESTS)
    # Without --model it takes the first of /v1/models.
    assert result["model_id"] == "epdd-demo" and result["output_lens"] == [TOKENS] * REQUESTS
    assert all(result["ttfts"]) and all(result["generated_texts"])


def test_the_pattern_of_sglang_bench_serving(daemon, facts):
    """Written after it, since SGLang comes with gigabytes of GPU kernels: pictures first, no
    stream_options, ignore_eos, and every line that is not empty is taken for an event with a choice."""
    body = {"model": facts["model"], "temperature": 0, "max_completion_tokens": TOKENS, "ignore_eos": True,
            "stream": True, "messages": [{"role": "user", "content": [
                *({"type": "image_url", "image_url": {"url": url}} for url in facts["images"]),
                {"type": "text", "text": "List the images in order."}]}]}

    async def streamed(session):
        text, chunks = "", 0
        async with session.post(daemon.url("/v1/chat/completions"), json=body) as answer:
            assert answer.status == 200
            async for line in answer.content:
                line = line.strip()
                if not line or line == b"data: [DONE]":
                    continue
                assert line.startswith(b"data: ")
                choice = json.loads(line.removeprefix(b"data: "))["choices"][0]
                text += choice["delta"].get("content") or ""
                chunks += 1
        return text, chunks, choice["finish_reason"]

    async def load():
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(streamed(session) for _ in range(REQUESTS)))

    # It counts the requested length as produced, so the daemon must not stop earlier.
    status, whole = daemon.post(body | {"stream": False})
    assert status == 200 and whole["usage"]["completion_tokens"] == TOKENS
    content = whole["choices"][0]["message"]["content"]
    assert content.startswith(facts["listing"])
    for text, chunks, reason in asyncio.run(load()):
        assert (text, reason) == (content, "length") and chunks > 2
