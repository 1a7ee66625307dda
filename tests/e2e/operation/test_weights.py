"""Weights files that change under a running daemon: running workers, restarted ones, and messages."""

import os
import shutil
import signal

from epdd import families
from tests.e2e.daemon import running


def test_other_weights_in_the_old_ones_place_are_not_mixed_in(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(families.DEMO, folder)
    weights = folder / "model.safetensors"
    other = tmp_path / "other"
    # The same names and shapes: only the content differs.
    whole = weights.read_bytes()
    other.write_bytes(whole[:-100_000] + bytes(100_000))
    with running(model=folder, encoder__workers=1, fleet__backoff_s=0.05, fleet__max_failures=2) as daemon:
        daemon.ready()
        os.replace(other, weights)
        assert daemon.say("Hello").startswith("Hello!")         # who runs keeps the old file
        os.kill(daemon.worker("encoder/0")["pid"], signal.SIGKILL)
        status = daemon.wait(lambda s: any(worker["state"] == "FAILED" for worker in s["workers"]), 60)
        reason, = status["why"]
        assert "the files are not those that the daemon began with" in reason
        assert daemon.say("Hello").startswith("Hello!")         # text needs no encoder
        weights.write_bytes(whole)          # a copy of the old ones is as good
        daemon.ask("resume", worker="encoder/0")
        daemon.ready()


def test_weights_cut_under_who_uses_them_are_named_as_the_cause(checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3_vl"), folder)     # in float32: what is not made over stays pages of the file
    with running(model=folder, encoder__workers=1, model__dtype="float32", fleet__backoff_s=0.05,
                 fleet__max_failures=2) as daemon:
        daemon.ready()
        os.truncate(folder / "model.safetensors", 4096)
        ask = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        assert daemon.post(ask)[0] == 503
        status = daemon.wait(lambda s: s["state"] == "failed", 60)
        assert any("pd/0 FAILED: died" in why and "not those that the daemon began with" in why
                   for why in status["why"])
        log = daemon.log()
        assert "pd/0 lost" in log and "ended by SIGBUS: a file that it maps" in log
        health, body = daemon.get("/health")
        assert health == 503 and body["status"] == "failed"
        assert daemon.post(ask)[0] == 503
        assert daemon.worker("encoder/0")["state"] == "READY"
