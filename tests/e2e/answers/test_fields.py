"""Fields that change an answer, through the whole daemon, and an address for IPv4 and IPv6."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image, ImageDraw
from tokenizers import Tokenizer

from epdd.families import DEMO
from tests.e2e.daemon import image_part, running, text_part

TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def circle():
    image = Image.new("RGB", (160, 160), "white")
    ImageDraw.Draw(image).ellipse((30, 30, 130, 130), fill="red")
    return image_part(image)


@pytest.fixture(scope="module")
def daemon():
    with running(encoder__workers=1, server__host="::" if socket.has_dualstack_ipv6() else "127.0.0.1") as daemon:
        yield daemon.ready()


QUESTION = [circle(), text_part("What colour is the circle?")]


def choice(daemon, path="/v1/chat/completions", **fields):
    body = {"messages": [{"role": "user", "content": QUESTION}]} if "chat" in path else {"prompt": "What"}
    status, answer = daemon.post({"temperature": 0, "max_tokens": 200, **body, **fields}, path)
    assert status == 200, answer
    found = answer["choices"][0]
    return found.get("text", found.get("message", {}).get("content")), found["finish_reason"]


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def test_both_families_are_served(daemon):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    for host in ("127.0.0.1", "::1"):
        with socket.create_connection((host, daemon.port), timeout=60) as client:
            client.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")


def test_forms_of_every_kind_on_both_endpoints(daemon):
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert choice(daemon, path, guided_choice=["blue", "green"])[0] in ("blue", "green")
        assert choice(daemon, path, structured_outputs={"regex": "(bl|gr)[a-z]{2,5}!"})[0].endswith("!")
        assert choice(daemon, path, grammar='root ::= "it is " ("blue" | "green")')[0] in ("it is blue", "it is green")
        text, reason = choice(daemon, path, ebnf='root ::= "(" root ")" | "x"', temperature=1, seed=3)
        assert reason == "length" or re.fullmatch(r"(\(*)x(\)*)", text)
        assert list(json.loads(choice(daemon, path, guided_json={
            "type": "object", "properties": {"c": {"enum": ["blue"]}}, "required": ["c"],
            "additionalProperties": False})[0])) == ["c"]


def test_refused_forms_reach_no_worker(daemon):
    done = [worker["done"] for worker in daemon.status()["workers"]]
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [
            {"role": "user", "content": QUESTION}]})):
        for name, value in (("regex", "(?=a)"), ("grammar", "root ::= x"), ("n_predict", 5), ("prompt_logprobs", 1)):
            status, answer = daemon.post({**body, name: value}, path)
            assert (status, answer["error"]["param"]) == (400, name)
    assert [worker["done"] for worker in daemon.status()["workers"]] == done


def test_bad_words_never_come(daemon):
    """At an answer's beginning, where the word has no space, and after one; alone, and beside other requests."""
    assert choice(daemon)[0] == "red"
    assert choice(daemon, bad_words=["red"])[0] != "red"
    assert choice(daemon)[0] == "red"
    text = choice(daemon, bad_words=["zebra"])[0]
    assert text == "red"
    alone = choice(daemon, "/v1/completions", prompt="The circle is", temperature=1.5, seed=4, max_tokens=60,
                   ignore_eos=True)[0]
    words = sorted(set(re.findall(r"[a-z]{3,}", alone)))[:20]
    kept = choice(daemon, "/v1/completions", prompt="The circle is", temperature=1.5, seed=4, max_tokens=60,
                  ignore_eos=True, bad_words=words)[0]
    assert words and kept != alone


def test_only_allowed_tokens_come(daemon):
    blue, green = ids("blue")[0], ids("green")[0]
    status, answer = daemon.post({"messages": [{"role": "user", "content": QUESTION}], "temperature": 1, "seed": 1,
                                  "allowed_token_ids": [blue, green], "max_tokens": 8, "logprobs": True})
    entries = answer["choices"][0]["logprobs"]["content"]
    both = {TOKENIZER.decode([token]) for token in (blue, green)}
    assert status == 200 and len(entries) == 8 and {entry["token"] for entry in entries} <= both


def test_stops_that_stay(daemon):
    assert choice(daemon, stop="d") == ("re", "stop")
    assert choice(daemon, stop="d", include_stop_str_in_output=True) == ("red", "stop")
    text, reason = choice(daemon, include_stop_str_in_output=True, skip_special_tokens=False)
    assert (text, reason) == ("red<|im_end|>", "stop")


def test_an_answer_that_was_begun_goes_on(daemon):
    """Its tokens are those of the prompt that transformers' template gives, as /tokenize shows."""
    messages = [{"role": "user", "content": "What"}, {"role": "assistant", "content": "The circle is"}]
    fields = {"messages": messages, "continue_final_message": True}
    status, found = daemon.post(fields, "/tokenize")
    text = TOKENIZER.decode(found["tokens"], skip_special_tokens=False)
    assert status == 200 and text.endswith("<|im_start|>assistant\nThe circle is")
    assert choice(daemon, **fields) == choice(daemon, "/v1/completions", prompt=found["tokens"])


def test_prompts_keep_their_last_tokens(daemon):
    prompt = "one two three four five six"
    status, answer = daemon.post({"prompt": prompt, "truncate_prompt_tokens": 3, "temperature": 0}, "/v1/completions")
    assert status == 200 and answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["text"] == choice(daemon, "/v1/completions", prompt=ids(prompt)[-3:], max_tokens=16)[0]
    status, answer = daemon.post({"messages": [{"role": "user", "content": QUESTION}], "truncate_prompt_tokens": 9})
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_the_same_in_any_company(daemon):
    """Requests that ban and force tokens, beside each other and beside plain ones, answer as if alone."""
    asks = [{"bad_words": ["red"]}, {"guided_regex": "[a-z ]{20,30}"}, {}, {"allowed_token_ids": ids("blue green red")},
            {"bad_words": ["a", "e"], "temperature": 1.5, "seed": 7, "ignore_eos": True, "max_tokens": 40},
            {"temperature": 1.5, "seed": 7, "ignore_eos": True, "max_tokens": 40}]
    asks = [{"max_tokens": 30} | ask for ask in asks]
    alone = [choice(daemon, **ask) for ask in asks]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lambda ask: choice(daemon, **ask), asks * 2)) == alone * 2
    assert alone[4] != alone[5] and alone[2] == ("red", "stop")


def test_a_seed_of_minus_one_is_random(daemon):
    said = {choice(daemon, temperature=2, seed=-1, ignore_eos=True, max_tokens=30)[0] for _ in range(3)}
    assert len(said) > 1
