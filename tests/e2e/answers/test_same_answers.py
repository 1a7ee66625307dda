"""The running daemon's greedy tokens are those of the undivided transformers model, for all families.

The daemon's own prompt (template, tokens, image spans) is compared with transformers' chat template and
processor rules as well, since the reference is built from the messages alone.
"""

import concurrent.futures
import json
import random

import pytest

from tests.e2e.daemon import image_part, running, text_part
from tests.models import checkpoints

pytestmark = pytest.mark.takes(40)

SIZES = [(64, 64), (200, 100), (97, 301), (28, 28), (333, 222), (1, 1), (500, 40), (120, 480)]
DEMO = "epdd/demo"


def pictures(count, seed):
    return [checkpoints.picture(*SIZES[(seed + i) % len(SIZES)], seed=seed * 10 + i) for i in range(count)]


def request(kind, seed):
    """(content parts, images) of one kind of request."""
    if kind == "text":
        return [text_part(f"describe {seed} words with no picture \u732b")], []
    images = pictures(1 if kind == "one" else 8 if kind == "eight" else 3, seed)
    parts = []
    for i, image in enumerate(images):
        if kind == "between":
            parts.append(text_part(f"\n picture {i}:"))
        parts.append(image_part(image))
    return [*parts, text_part("\nwhat is in it?")], images


def reference(model, content, images, max_new):
    """Tokens of prompt and answer by transformers alone."""
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": [
        {"type": "image"} if part["type"] == "image_url" else part for part in content]}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    grids = checkpoints.pixel_values(model, images)[1].tolist() if images else []
    prompt = []
    for token in ids:
        prompt += [pad] * (lambda g: g[1] * g[2] // 4)(grids.pop(0)) if token == pad else [token]
    answer = checkpoints.reference_generate(model, prompt, images, max_new)
    eos = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    ended = bool(answer) and answer[-1] in eos
    return len(prompt), answer[:-1] if ended else answer, "stop" if ended else "length", tokenizer


def check(daemon, model, kind, seed, max_new=12):
    """Ask the daemon for tokens and compare each."""
    content, images = request(kind, seed)
    answer = daemon.chat(content, max_tokens=max_new, logprobs=True, top_logprobs=0)
    prompt_tokens, wanted, reason, tokenizer = reference(model, content, images, max_new)
    choice = answer["choices"][0]
    got = [entry["bytes"] for entry in choice["logprobs"]["content"]]
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert [bytes(piece) for piece in got] == [piece_bytes(tokenizer, token) for token in wanted], (kind, seed)
    assert choice["finish_reason"] == reason and answer["usage"]["completion_tokens"] >= len(wanted)
    return kind, seed


def piece_bytes(tokenizer, token):
    """The bytes a byte-level token stands for; ids beyond the tokenizer stand for none."""
    piece = tokenizer.convert_ids_to_tokens(token) or ""
    if piece in tokenizer.all_special_tokens or piece.startswith("<|"):
        return piece.encode()
    return bytes(BYTE_OF[char] for char in piece)


def byte_table():
    """GPT-2's printable stand-ins for bytes: visible Latin-1 is itself, the rest count up from 256."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = byte_table()


@pytest.mark.parametrize("family", [*checkpoints.FAMILIES, "demo"])
def test_greedy_tokens_are_those_of_generate(family, checkpoint):
    model = DEMO if family == "demo" else checkpoint(family)
    with running(model, encoder__workers=2, pd__max_batched_tokens=96) as daemon:
        daemon.ready()
        for kind in ("text", "one", "eight", "between"):
            check(daemon, model, kind, 1)
        mixed = [(kind, seed) for kind in ("text", "one", "eight", "between") for seed in range(2, 6)]
        random.Random(0).shuffle(mixed)
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda item: check(daemon, model, *item), mixed))
        rest = daemon.at_rest()
        assert rest["pinned"] == 0 and rest["waiting"] == 0
        print(family, json.dumps(daemon.status()["cache"]))
