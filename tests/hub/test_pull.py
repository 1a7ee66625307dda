"""`epdd pull` and `epdd serve ID` as a user runs them, with the real huggingface_hub, against a Hub on loopback."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from epdd.families import DEMO
from tests.e2e.daemon import Daemon
from tests.hub import hub_server
from tests.hub.hub_server import COMMIT, Repo

pytestmark = pytest.mark.takes(40)

ROOT = Path(__file__).parents[2]
ID = "org/demo"
WEIGHTS = "model.safetensors"
SIZE = (DEMO / WEIGHTS).stat().st_size
OUTSIDE = "../" * 6 + "outside"
LIES = {"etag": {"lies": {"config.json": {"oid": OUTSIDE}}}, "commit": {"commit": OUTSIDE},
        "hash": {"lies": {WEIGHTS: {"lfs": {"oid": OUTSIDE, "size": SIZE, "pointerSize": 134}}}},
        "size": {"lies": {WEIGHTS: {"lfs": {"oid": "0" * 64, "size": 10, "pointerSize": 134}}}}}
GUARD_S = 300           # hangs only: the machine may be busy


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders like repositories: with other programs' files, an older revision, and models that are not served."""
    root = tmp_path_factory.mktemp("repos")
    main = shutil.copytree(DEMO, root / "main", ignore=shutil.ignore_patterns("samples"))
    (main / "onnx").mkdir()
    for name in ("pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", "model.gguf", "weights.pth"):
        (main / name).write_bytes(b"not for epdd")
    old = shutil.copytree(main, root / "old")
    (old / "generation_config.json").write_text('{"do_sample": false, "eos_token_id": 2}')
    other = shutil.copytree(main, root / "other")
    (other / "config.json").write_text('{"model_type": "llava"}')
    awq = shutil.copytree(main, root / "awq")
    config = json.loads((awq / "config.json").read_text())
    (awq / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    pickled = root / "pickled"
    pickled.mkdir()
    shutil.copy(main / "config.json", pickled)
    shutil.copy(main / "pytorch_model.bin", pickled)
    return {"main": main, "old": old, "other": other, "awq": awq, "pickled": pickled}


@pytest.fixture
def hub(models):
    with hub_server.Hub({
            ID: Repo({"main": models["main"], "v1": models["old"]}),
            "org/gated": Repo({"main": models["main"]}, gated=True, token="let-me-in"),
            "org/private": Repo({"main": models["main"]}, token="let-me-in"),
            "org/damaged": Repo({"main": models["main"]}, damaged={WEIGHTS}),
            **{f"org/{name}": Repo({"main": models["main"]}, **lie) for name, lie in LIES.items()},
            "org/llava": Repo({"main": models["other"]}), "org/awq": Repo({"main": models["awq"]}),
            "org/pickled": Repo({"main": models["pickled"]})}) as hub:
        yield hub


@pytest.fixture
def run(hub, tmp_path):
    """`run("pull", ID, HF_TOKEN=...)`: the finished command; `run.start(...)` only starts it.  Or another `program`."""
    def start(*arguments, program="epdd.cli", **environ):
        env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        env |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), **environ}
        return subprocess.Popen([sys.executable, "-m", program, *arguments], cwd=ROOT, env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(*arguments, **options):
        process = start(*arguments, **options)
        out, err = process.communicate(timeout=GUARD_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    run.start, run.cache = start, tmp_path / "home" / "hub"
    return run


def snapshot(run, revision="main", model=ID):
    return run.cache / f"models--{model.replace('/', '--')}" / "snapshots" / COMMIT[revision]


def test_cold_then_cached_and_offline(hub, run, models):
    done = run("pull", ID)
    folder = snapshot(run)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert "downloading org/demo: 100 % of 4.19 MB" in done.stderr
    wanted = {path.name for path in DEMO.iterdir() if path.suffix in (".json", ".jinja", ".safetensors")}
    assert {path.name for path in folder.iterdir()} == wanted
    assert (folder / WEIGHTS).is_symlink()
    assert all((folder / name).read_bytes() == (models["main"] / name).read_bytes() for name in wanted)
    assert hub.sent[WEIGHTS] == SIZE
    # Again: it asks for a newer revision and fetches nothing; offline it does not ask.
    before = dict(hub.sent)
    assert run("pull", ID).returncode == 0
    asked = len(hub.requests)
    offline = run("pull", ID, HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, f"{folder}\n")
    assert "is here already" in offline.stderr
    seen = run("check", ID, "--json", HF_HUB_OFFLINE="1")
    assert json.loads(seen.stdout)["folder"] == str(folder)
    # The daemon serves a model by its id from the cache's links, without the network.
    plan = run("serve", ID, "--plan", HF_HUB_OFFLINE="1")
    assert plan.returncode == 0 and "encoder/0" in plan.stdout, plan.stderr
    assert (dict(hub.sent), len(hub.requests)) == (before, asked)


def test_interrupted_and_gone_on(hub, run):
    hub.hold_after[WEIGHTS] = 3 << 20
    process = run.start("pull", ID)
    assert hub.held.wait(GUARD_S)
    part = next((run.cache / "models--org--demo" / "blobs").glob("*.part"))
    while part.stat().st_size < 2 << 20:        # what was sent arrives
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=GUARD_S)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "epdd: stopped; `epdd pull org/demo` goes on where this left off"
    here = part.stat().st_size
    offline = run("serve", ID, HF_HUB_OFFLINE="1")
    assert offline.returncode == 78 and "only in part in the local cache" in offline.stderr
    hub.hold_after.clear()
    hub.release.set()
    hub.sent.clear()
    again = run("pull", ID)
    assert again.returncode == 0, again.stderr
    assert hub.sent[WEIGHTS] == SIZE - here and here >= 2 << 20
    assert hub.asked("GET", WEIGHTS)[-1][2] == f"bytes={here}-"
    assert (snapshot(run) / WEIGHTS).read_bytes() == (DEMO / WEIGHTS).read_bytes()
    assert not part.exists()


def test_a_broken_connection_costs_only_the_rest(hub, run):
    hub.cut_after[WEIGHTS] = 3 << 20
    done = run("pull", ID)
    assert done.returncode == 0, done.stderr
    assert (snapshot(run) / WEIGHTS).read_bytes() == (DEMO / WEIGHTS).read_bytes()
    assert hub.sent[WEIGHTS] < SIZE + (1 << 20) + hub_server.PIECE


def test_a_revision(hub, run, models):
    done = run("pull", ID, "--revision", "v1")
    assert (done.returncode, done.stdout) == (0, f"{snapshot(run, 'v1')}\n"), done.stderr
    assert (snapshot(run, "v1") / "generation_config.json").read_text().startswith('{"do_sample": false, "eos')
    assert run("check", ID, HF_HUB_OFFLINE="1").returncode == 78         # main is another
    assert run("check", ID, "--revision", "v1", HF_HUB_OFFLINE="1").returncode == 0
    wrong = run("pull", ID, "--revision", "v2")
    assert (wrong.returncode, wrong.stderr) == (
        78, "epdd: org/demo has no revision 'v2'; name a branch, a tag or a whole commit\n")


def test_who_may_read_it(hub, run):
    gated = run("pull", "org/gated")
    assert (gated.returncode, gated.stderr) == (
        78, f"epdd: org/gated is gated: accept the terms at {hub.endpoint}/org/gated, then set HF_TOKEN to a token of "
        "your account\n")
    assert "was not let in" in run("pull", "org/gated", HF_TOKEN="another").stderr
    assert "refuses the token (401)" in run("pull", "org/private", HF_TOKEN="another").stderr
    missing = run("pull", "org/nothing")
    assert (missing.returncode, missing.stderr) == (
        78, f"epdd: org/nothing is no folder here, and no model at {hub.endpoint} that is open to all: check the "
        "spelling, or set HF_TOKEN to a token that may read it\n")
    hub.requests.clear()
    assert run("pull", "org/gated", HF_TOKEN="let-me-in").returncode == 0
    # The token goes to the Hub, never to the host that its storage is on.
    assert {request[3] for request in hub.requests if request[1].startswith("/org/")} == {"Bearer let-me-in"}
    assert {request[3] for request in hub.requests if request[1].startswith("/storage/")} == {""}


def test_no_network_and_a_hub_that_is_down(hub, run):
    nobody = "http://127.0.0.1:9"
    away = run("serve", "org/other", HF_ENDPOINT=nobody)
    assert away.returncode == 75
    assert away.stderr.splitlines()[-1] == (
        f"epdd: org/other is not in the local cache ({run.cache}), and {nobody} cannot be reached ([Errno 111] "
        "Connection refused); try again with a network, or copy the model here and name its folder")
    offline = run("serve", "org/other", HF_HUB_OFFLINE="1")
    assert (offline.returncode, "HF_HUB_OFFLINE forbids to download it; unset that, or" in offline.stderr) == (78, True)
    hub.fault = 503
    down = run("pull", "org/other")
    assert (down.returncode, f"{hub.endpoint} answers 503; try again later" in down.stderr) == (75, True)


def test_refused_before_the_weights_are_fetched(hub, run):
    llava = run("pull", "org/llava")
    assert llava.returncode == 78 and "model_type 'llava'" in llava.stderr, llava.stderr
    awq = run("pull", "org/awq")
    assert awq.returncode == 78 and "quant_method 'awq' is not served" in awq.stderr, awq.stderr
    pickled = run("pull", "org/pickled")
    assert pickled.returncode == 78 and "no weights as safetensors, only .bin" in pickled.stderr
    assert hub.sent[WEIGHTS] == hub.sent["pytorch_model.bin"] == 0


def test_damaged_on_the_way(hub, run):
    done = run("pull", "org/damaged")
    assert done.returncode == 78
    assert "model.safetensors arrived damaged: its SHA-256 is not the one that the Hub names" in done.stderr
    hub.repos["org/damaged"].damaged.clear()
    assert run("pull", "org/damaged").returncode == 0
    assert hub.sent[WEIGHTS] == 2 * SIZE


def test_a_service_downloads_only_if_its_settings_say_so(hub, run, tmp_path):
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    told = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    refused = run("serve", ID, "--plan", **told)
    assert (refused.returncode, hub.sent) == (78, {})
    daemon = run("--model", ID, "--plan", program="epdd", **told)       # as the unit starts it
    assert (daemon.returncode, daemon.stderr) == (78, refused.stderr)
    assert refused.stderr == (f"epdd: org/demo is not in the local cache ({run.cache}); run `epdd pull org/demo`, for "
                              "a service with its HF_HOME, or set model.download = true\n")
    allowed = run("--model", ID, "--plan", program="epdd", EPDD_MODEL_DOWNLOAD="true", **told)
    assert allowed.returncode == 0 and hub.sent[WEIGHTS] == SIZE, allowed.stderr
    with manager:
        manager.settimeout(GUARD_S)
        # systemd's start timeout is extended while bytes arrive.
        status, extend = manager.recv(4096).decode().split("\n")
    assert status.startswith("STATUS=downloading org/demo: ") and status.endswith(" of 4.19 MB")
    assert extend == "EXTEND_TIMEOUT_USEC=300000000"


def test_serve_downloads_and_serves_by_the_id(hub, run, tmp_path):
    process = run.start("serve", ID, "--port", "0", "--emulate", "router-table", "--set",
                        f"admin.socket={tmp_path}/admin.sock", "--set", "arena.bytes=0x4000000")
    try:
        # `python -m epdd` replaces the process that downloaded.
        daemon = Daemon(process, tmp_path)
        daemon.log = lambda: process.stderr.read()
        daemon.listening().ready()
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        assert command[1:4] == [b"-m", b"epdd", b"org/demo"]
        with urllib.request.urlopen(f"http://127.0.0.1:{daemon.port}/v1/models/{ID}", timeout=60) as answer:
            assert json.load(answer)["id"] == ID
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=GUARD_S)
    assert process.returncode == 0


def test_a_daemon_with_a_folder_never_imports_the_library():
    code = ("import sys; from epdd import daemon; from epdd.cli import main; "
            "assert daemon.main(['--plan', '--set', 'model.path=epdd/demo']) == 0; "
            "print(sorted({'huggingface_hub', 'torch', 'transformers'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=GUARD_S)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    code = "import sys; import epdd.hub.download; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          timeout=GUARD_S).stdout == "[]\n"


@pytest.mark.parametrize(("lie", "words"), [
    ("etag", "as ETag of a file"), ("commit", "as the commit"), ("hash", f"as {WEIGHTS}'s hash"),
    ("size", "is longer than the 10 bytes")])
def test_no_name_that_a_hub_gives_leads_out_of_the_cache(run, tmp_path, lie, words):
    home = tmp_path / "1/2/3/4/5/home"
    done = run("pull", f"org/{lie}", HF_HOME=str(home))
    assert done.returncode == 78 and words in done.stderr, done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file() and home not in path.parents] == []
    assert sum(path.stat().st_size for path in home.rglob("*.part")) == 0
