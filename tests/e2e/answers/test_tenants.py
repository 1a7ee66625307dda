"""Two API keys on one daemon: neither sees what the other sent, and neither waits behind the other."""

import concurrent.futures
import json
import urllib.request

import pytest

from tests.e2e.daemon import image_part, running, text_part
from tests.models import checkpoints


@pytest.fixture(scope="module")
def daemon(checkpoint):
    with running(checkpoint("qwen3_vl"), encoder__workers=1, pd__batch_max=4,
                 server__api_keys="alice,bob") as daemon:
        yield daemon.ready()


def ask(daemon, key, content, **fields):
    """Tokens of the prompt that need not be computed again, and the images' hits and misses of this request."""
    before = daemon.status()["cache"]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}
    status, answer = daemon.request(urllib.request.Request(
        daemon.url("/v1/chat/completions"), json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}))
    assert status == 200, answer
    after = daemon.status()["cache"]
    return (answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            after["hits"] + after["joined"] - before["hits"] - before["joined"], after["misses"] - before["misses"])


def test_another_key_finds_nothing_cached(daemon):
    content = [image_part(checkpoints.picture(200, 150, seed=1)), text_part("what is this?")]
    assert ask(daemon, "alice", content) == (0, 0, 1)
    assert ask(daemon, "bob", content) == (0, 0, 1)
    for key in ("alice", "bob"):
        cached, hits, misses = ask(daemon, key, content)
        assert cached > 20 and (hits, misses) == (1, 0)


def test_another_salt_finds_nothing_cached(daemon):
    content = [image_part(checkpoints.picture(200, 150, seed=2)), text_part("and what is this?")]
    assert ask(daemon, "alice", content, cache_salt="a") == (0, 0, 1)
    assert ask(daemon, "alice", content, cache_salt="b") == (0, 0, 1)
    assert ask(daemon, "bob", content, cache_salt="a") == (0, 0, 1)
    cached, hits, misses = ask(daemon, "alice", content, cache_salt="a")
    assert cached > 20 and (hits, misses) == (1, 0)


def test_two_keys_at_once_are_two_encodings(daemon):
    content = [image_part(checkpoints.picture(300, 250, seed=3)), text_part("at once")]
    before = daemon.status()["cache"]["misses"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: ask(daemon, key, content), ["alice", "bob"] * 4))
    assert daemon.status()["cache"]["misses"] == before + 2


def test_many_requests_of_one_key_do_not_keep_another_waiting(daemon):
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        # Long enough that a heartbeat sees them wait, on the fastest machine.
        many = [pool.submit(ask, daemon, "alice", f"number {i}", n=4, max_tokens=500, ignore_eos=True)
                for i in range(10)]
        daemon.wait(lambda status: sum(worker.get("waiting") or 0 for worker in status["workers"]) >= 30)
        ask(daemon, "bob", "hello")
        answered = sum(request.done() for request in many)
        # It waited for a place, not for those 30 in front of it.
        assert answered < 5
