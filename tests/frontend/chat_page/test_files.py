"""The chat page's files and figures as a browser gets them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from epdd.families import DEMO
from epdd.frontend.chat_page import routes
from epdd.frontend.chat_page.figures import Figures, shown
from tests.ctl.snapshot import snapshot, worker

from tests.frontend.bench import Bench, hosted

FILES = [path for path in (Path(routes.__file__).parent / "files").rglob("*") if path.is_file()]


@hosted()
async def test_every_file_comes_with_a_strict_policy(bench: Bench) -> None:
    paths = {"/": "text/html", "/page/page.css": "text/css", "/page/main.js": "text/javascript",
             "/page/icon.svg": "image/svg+xml", "/page/examples.json": "application/json"}
    for path, kind in paths.items():
        answer = await bench.http.get(bench.url + path)
        assert (answer.status, answer.content_type) == (200, kind)
        policy = dict(rule.split(" ", 1) for rule in answer.headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'" == policy["style-src"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-cache"
        head = await bench.http.head(bench.url + path)
        assert (head.status, head.headers["Content-Length"]) == (200, str(len(await answer.read())))
        assert await head.read() == b""


@hosted()
async def test_a_file_that_has_not_changed_is_not_sent_again(bench: Bench) -> None:
    answer = await bench.http.get(f"{bench.url}/page/main.js")
    again = await bench.http.get(f"{bench.url}/page/main.js", headers={"If-None-Match": answer.headers["ETag"]})
    assert again.status == 304 and await again.read() == b"" and again.headers["ETag"] == answer.headers["ETag"]
    other = await bench.http.get(f"{bench.url}/page/page.css", headers={"If-None-Match": answer.headers["ETag"]})
    assert other.status == 200


@hosted()
async def test_reading_is_all_one_can_do(bench: Bench) -> None:
    for path in ("/", "/page/main.js", "/status"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            answer = await bench.http.request(method, bench.url + path)
            assert answer.status == 405 and set(answer.headers["Allow"].split(",")) == {"GET", "HEAD"}
    for path in ("/page/", "/page/routes.py", "/page/..%2froutes.py", "/page/index.html", "/page/red-circle.png"):
        assert (await bench.http.get(bench.url + path)).status == 404


@hosted()
async def test_examples_are_the_demo_models_alone(bench: Bench) -> None:
    assert await (await bench.http.get(f"{bench.url}/page/examples.json")).json() == []


def test_the_pictures_of_the_examples_are_there() -> None:
    assert all((DEMO / "samples" / name).is_file() for _, names in routes._EXAMPLES for name in names)


def test_nothing_names_another_host_and_nothing_is_inline() -> None:
    for file in FILES:
        text = file.read_text()
        assert not re.search(r"(https?:)?//(?!www\.w3\.org/2000/svg)[a-z0-9-]+\.[a-z]", text), file.name
        assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\(|<style|\sstyle=|\son[a-z]+=\"", text), file.name
    # Every module that is imported, and every file that the page names, is one of the files.
    named = {name for file in FILES for name in
             re.findall(r"from \"\./([^\"]+)\"|(?:href|src)=\"page/([^\"]+)\"", file.read_text()) for name in name}
    assert named - {""} <= {file.name for file in FILES} and "main.js" in named


def test_status_says_nothing_of_paths_processes_and_reasons() -> None:
    full = snapshot(why=["pd/0 failed: /secret/why"], workers=[
        worker("pd/0", last_error="/secret/error", warning="/secret/warning", pid=987654, cpus=[3],
               rate_per_s=2.5, share=0.25, slow=True, later="secret")], later="secret")
    full["model"]["path"], full["pid"] = "/secret/model", 987655
    text = json.dumps(shown(full))
    assert "secret" not in text and "98765" not in text and "/models" not in text
    assert "pid" not in text and "listen" not in text
    found = json.loads(text)
    assert found["model"] == {"name": "Qwen3-VL-8B", "type": "qwen3_vl", "context_max": 32768}
    assert found["router"].items() <= full["router"].items() and found["arena"] == full["arena"]
    assert {"i_cpu", "i_gpu", "budget_cpu", "ratio", "queue_jobs"} <= found["router"].keys()
    assert {key: found["workers"][0][key] for key in ("name", "rate_per_s", "share", "slow")} == {
        "name": "pd/0", "rate_per_s": 2.5, "share": 0.25, "slow": True}
    assert "emulated" not in found
    full["emulated"] = {"profile": "laptop", "scale": 1, "answers": "demo", "about": "a", "file": "/secret"}
    assert shown(full)["emulated"] == {"profile": "laptop", "scale": 1, "answers": "demo", "about": "a"}


@hosted()
async def test_status_over_http(bench: Bench) -> None:
    answer = await bench.http.get(f"{bench.url}/status")
    body: dict[str, Any] = await answer.json()
    assert (answer.status, body["state"], body["router"]["queue_jobs"]) == (200, "ready", 4)
    assert answer.headers["Cache-Control"] == "no-store" and answer.headers["X-Content-Type-Options"] == "nosniff"
    head = await bench.http.head(f"{bench.url}/status")
    assert (head.status, await head.read()) == (200, b"")


@pytest.mark.asyncio
async def test_one_snapshot_a_second_serves_all_pages() -> None:
    now, taken = 100.0, 0

    def take() -> dict[str, Any]:
        nonlocal taken
        taken += 1
        return snapshot(uptime_s=now)

    figures = Figures(take, lambda: now)
    for now, expected in ((100.0, 1), (100.5, 1), (100.99, 1), (101.0, 2), (101.9, 2), (102.0, 3)):
        for _ in range(50):
            answer = await figures.get(None)  # type: ignore[arg-type]
        assert taken == expected and isinstance(answer.body, bytes)
        assert json.loads(answer.body)["uptime_s"] == {1: 100.0, 2: 101.0, 3: 102.0}[expected]
