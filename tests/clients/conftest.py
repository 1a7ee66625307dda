"""One demo-model daemon for all clients, and the demo model's right answers."""

import json
import os
import subprocess

import pytest

from tests.clients import venvs
from tests.e2e.daemon import ROOT, data_url, running

SAMPLES = ROOT / "epdd" / "demo" / "samples"
CLIENT_S = 180

# Else LiteLLM fetches its list of prices from the Internet.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


def pytest_collection_modifyitems(items):
    # Last of all: .ci/run installs the clients while the other tests run.
    items.sort(key=lambda item: "clients" in item.path.parts)


@pytest.fixture(scope="package")
def daemon():
    with running(encoder__workers=1) as daemon:
        yield daemon.ready()


@pytest.fixture(autouse=True)
def undisturbed(daemon):
    """After each client the same workers run, and hold nothing."""
    before = daemon.at_rest()
    yield
    after = daemon.at_rest()
    assert after["pids"] == before["pids"] and after["pinned"] == 0


@pytest.fixture(scope="package")
def facts(daemon):
    """The standard input of a client's program: URL, question and the right answer."""
    return {
        "url": daemon.url("/v1"), "model": "epdd-demo",
        "image": picture("red-circle.png"), "question": "What colour is the circle?", "answer": "red",
        "prompt_tokens": 52, "completion_tokens": 2,
        # A user's turn with the image, the assistant's call, the tool's result, and the question.
        "history_tokens": 146,
        "images": [picture("red-circle.png"), picture("blue-square.png"), picture("green-triangle.png")],
        "listing": "1: red circle, 2: blue square, 3: green triangle",
        "too_long": "word " * 9000,
        "broken_image": data_url(b"this is no image"),
    }


@pytest.fixture
def run(facts):
    """`run(program, *arguments, **facts)`: runs a client's program, which must succeed; returns its output."""
    def run(*command, **others):
        command = list(map(str, command))
        ended = subprocess.run(command, input=json.dumps(facts | others), capture_output=True, text=True,
                               timeout=CLIENT_S, cwd=venvs.PROGRAMS)
        assert ended.returncode == 0, f"{command} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout
    return run


@pytest.fixture
def installed():
    """`installed(name)`: the folder of a client's environment; skips the test if there is none."""
    def installed(name):
        try:
            return venvs.found(name)
        except venvs.Unavailable as error:
            pytest.skip(str(error))
    return installed


def picture(name):
    return data_url((SAMPLES / name).read_bytes())
