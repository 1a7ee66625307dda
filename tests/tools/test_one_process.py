"""The baseline of tools/bench/serving/serve.py answers as epdd does, from one process."""

import json
import urllib.request
from pathlib import Path

from tests.e2e.daemon import ROOT, image_part, text_part
from tools import launch

SAMPLE = ROOT / "epdd" / "demo" / "samples" / "red-circle.png"


def test_one_process_serves():
    settings = ["encoder.workers=1", "pd.workers=1", "arena.bytes=0x4000000", "pd.kv_tokens=16384"]
    with launch.Daemon(settings=settings, program=["-m", "tools.bench.serving.one_process"]) as daemon:
        daemon.ready()
        body = {"messages": [{"role": "user", "content": [image_part(SAMPLE.read_bytes()),
                                                          text_part("What colour is the circle?")]}], "temperature": 0}
        request = urllib.request.Request(daemon.chat_url, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == "red"
        encoder, pd = daemon.status()["workers"]
        assert (encoder["name"], pd["name"]) == ("encoder/0", "pd/0")
        # The helper that decodes images, a thread of every encoder, runs in the other's process.
        names = [{path.read_text().strip() for path in Path(f"/proc/{worker['pid']}/task").glob("*/comm")}
                 for worker in (encoder, pd)]
        assert ["preprocess" in each for each in names] == [False, True]
        pids = [encoder["pid"], pd["pid"]]
    assert daemon.process.returncode == 0 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
