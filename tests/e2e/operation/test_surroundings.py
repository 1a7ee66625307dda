"""The daemon's surroundings: full disks and /dev/shm, a changed clock, secrets that must not be logged."""

import http.client
import json
import os
import subprocess
import textwrap
import threading

import pytest

from epdd import families
from tests.e2e.daemon import image_part, running, text_part

# Without torch: it starts in a second, and its workers compare every byte of each lease.
LIGHT = {"emulation__profile": "router-table", "encoder__workers": "gpu:1", "pd__workers": "gpu:1"}
PICTURE = (families.DEMO / "samples" / "red-circle.png").read_bytes()
CONTENT = [image_part(PICTURE), text_part("a secret question")]
ASK = {"messages": [{"role": "user", "content": CONTENT}], "max_tokens": 3}
LONG = ASK | {"stream": True, "max_tokens": 12_000, "ignore_eos": True}     # a thousand tokens a second

own_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode != 0,
    reason="needs to mount in a namespace of its own")


def metric(daemon, name):
    text = daemon.get("/metrics")[1]
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])


@own_mounts
def test_a_full_dev_shm_and_a_full_disk_cost_no_request(started_by, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    started_by(f"""
        exec unshare -m sh -c '
            mount -t tmpfs -o size=64k none /dev/shm && mount -t tmpfs -o size=64k none {disk}
            head -c 1M /dev/zero > /dev/shm/full; head -c 1M /dev/zero > {disk}/full
            HOME={disk} XDG_CACHE_HOME={disk} TMPDIR={disk} exec "$@" 2> /dev/full > /dev/full' sh "$@"
    """)
    with running(**LIGHT, log__requests=disk / "requests", log__level="debug") as daemon:
        daemon.ready()
        assert f"{disk} " in open(f"/proc/{daemon.process.pid}/mounts").read()
        for _ in range(5):
            status, answer = daemon.post(ASK)
            assert status == 200 and answer["usage"]["completion_tokens"] == 3
        daemon.wait(lambda status: metric(daemon, "epdd_request_log_dropped_total") == 5, 120)
        assert metric(daemon, "epdd_request_log_lines_total") == 0
        os.kill(daemon.worker("encoder/0")["pid"], 9)
        daemon.wait(lambda status: status["state"] != "ready", 120)
        daemon.ready()      # also a new worker needs no disk
        assert daemon.post(ASK)[0] == 200
        daemon.at_rest()


def test_a_request_log_that_hangs_costs_no_request_and_no_stop(tmp_path):
    path = tmp_path / "requests"
    os.mkfifo(path)
    with running(**LIGHT, log__requests=path) as daemon:
        daemon.ready()
        assert [daemon.post(ASK)[0] for _ in range(3)] == [200] * 3
        # And it stops in time: running() sees to that.


def test_the_clock_is_set_back_and_forth_under_load(monkeypatch, tmp_path):
    step = tmp_path / "step"
    step.write_text("0")
    # In the daemon, its fork server and its workers.
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(f"""
        import time
        now = time.time
        time.time = lambda: now() + float(open({str(step)!r}).read())
    """))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with running(**LIGHT, fleet__stall_s=2, server__timeout_s=300) as daemon:
        created = daemon.ready().post(ASK)[1]["created"]
        told, pids = [], [worker["pid"] for worker in daemon.status()["workers"]]

        def long():
            connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=120)
            connection.request("POST", "/v1/chat/completions", json.dumps(LONG))
            told.append(connection.getresponse().read().decode())

        talk = threading.Thread(target=long)
        talk.start()
        daemon.wait(lambda status: status["requests"]["running"] == 1, 120)
        for seconds in (3600, -3600, 86400 * 400, 0):
            step.write_text(str(seconds))
            began = daemon.status()["uptime_s"]
            answer = daemon.post(ASK)
            assert answer[0] == 200 and abs(answer[1]["created"] - created - seconds) < 600
            # For longer than a worker may be silent.
            status = daemon.wait(lambda status: status["uptime_s"] > began + 3, 30)
            assert status["uptime_s"] < began + 60 and status["state"] == "ready"
            assert 0 <= status["requests"]["latency_s"]["p99"] < 60
        talk.join(120)
        assert "data: [DONE]" in told[0] and '"finish_reason":"length"' in told[0]
        assert [worker["pid"] for worker in daemon.status()["workers"]] == pids


def test_keys_and_questions_are_in_no_log(tmp_path):
    path, keys = tmp_path / "requests", tmp_path / "keys"
    keys.write_text("sk-in-a-file\n")
    with running(**LIGHT, log__level="debug", log__requests=path, server__api_keys="sk-of-the-settings",
                 server__api_keys_file=keys) as daemon:
        daemon.ready()

        def ask(key, path="/v1/chat/completions", body=json.dumps(ASK), **headers):
            connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)
            connection.request("POST", path, body, {"Authorization": f"Bearer {key}", **headers})
            status = connection.getresponse().status
            connection.close()
            return status

        assert [ask(key) for key in ("sk-of-the-settings", "sk-in-a-file", "sk-wrong")] == [200, 200, 401]
        assert ask("sk-in-a-file", body="{a secret question") == 400
        assert ask("sk-in-a-file", body=json.dumps({**ASK, "api_key": "sk-in-a-body", "temperature": "sk-"})) == 400
        assert ask("sk-in-a-file", path="/v1/nowhere?key=sk-in-a-url") == 404
        assert ask("sk-in-a-file", **{"Content-Length": "sk-in-a-header"}) == 400
        assert ask("sk-in-a-file" + "x" * 20_000) == 400
        os.kill(daemon.worker("pd/0")["pid"], 9)
        daemon.wait(lambda status: status["state"] != "ready" or status["workers"][1]["restarts"], 120)
        daemon.ready()
        keys.write_text("sk-new\n")
        daemon.ask("reload")
        assert [ask(key) for key in ("sk-of-the-settings", "sk-in-a-file", "sk-new")] == [200, 401, 200]
        keys.write_text("")
        with pytest.raises(AssertionError, match="holds no key"):
            daemon.ask("reload")    # refused: an empty file must not open the API
        assert [ask(key) for key in ("sk-new", "")] == [200, 401]
        daemon.wait(lambda status: path.exists() and len(path.read_text().splitlines()) >= 6, 120)
        log = (daemon.folder / "log").read_text()
        assert "reload refused" in log and "pd/0 lost" in log
        for text in (log, path.read_text()):
            assert "sk-" not in text and "secret question" not in text
