"""Effect of the prefix cache: time to first token of a second question about the same images.

    python -m tools.bench.workers.prefix --model FOLDER --images 8 --side 448

Two real daemons, one with pd.prefix_cache and one without, take turns.  In each round both get the same new random
images and a question, which also fills the encoder cache of both, then another question about them.  So the second
question needs no encoding in either, and the images' prefill only without the prefix cache.  Prints medians over the
rounds, their ratios, and the prompt's tokens with the cached ones.
"""

import argparse
import base64
import http.client
import io
import json
import statistics
import sys
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

from tools import launch
import numpy as np
from PIL import Image

QUESTIONS = ("What do these pictures have in common?", "Now list what differs between them, one by one.")


def daemon(model, cache, settings):
    return launch.Daemon(*(["--model", model] if model else []),
                         settings=[f"pd.prefix_cache={str(cache).lower()}", *settings])


def pictures(count, side, seed):
    """Content parts of random pictures, unique to the seed."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(count):
        small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
        file = io.BytesIO()
        small.resize((side, side), Image.Resampling.BICUBIC).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def ask(at, parts, question):
    """(seconds to the first token, usage)."""
    body = json.dumps({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}],
                       "max_tokens": 2, "ignore_eos": True, "temperature": 0, "stream": True,
                       "stream_options": {"include_usage": True}})
    connection = http.client.HTTPConnection("127.0.0.1", at, timeout=3600)
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()       # its head is sent with the first token
    seconds = time.perf_counter() - began
    text = answer.read().decode()
    if answer.status != 200:
        sys.exit(text)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return seconds, next(event["usage"] for event in events if event.get("usage"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder (default: the demo model)")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--side", type=int, default=448, help="of the square images, in pixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of both daemons")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with ExitStack() as stack:
        daemons = {name: stack.enter_context(daemon(args.model, name == "on", args.set)) for name in ("on", "off")}
        ports = {}
        for name, one in daemons.items():
            one.ready()
            ports[name] = urlsplit(one.url).port
        seconds = {(name, question): [] for name in ports for question in (1, 2)}
        usages = {}
        for seed in range(args.rounds + 1):
            parts = pictures(args.images, args.side, seed)
            for name, at in ports.items():
                for question, text in enumerate(QUESTIONS, 1):
                    took, usages[name, question] = ask(at, parts, text)
                    if seed:        # the first round warms up
                        seconds[name, question].append(took)
    report({key: statistics.median(values) for key, values in seconds.items()}, usages, args.json)


def report(medians, usages, as_json):
    rows = [{"prefix_cache": name, "question": question, "ttft_s": median,
             "prompt_tokens": usages[name, question]["prompt_tokens"],
             "cached_tokens": usages[name, question]["prompt_tokens_details"]["cached_tokens"]}
            for (name, question), median in medians.items()]
    ratios = {"second_to_first": medians["on", 2] / medians["on", 1],
              "second_to_first_without": medians["off", 2] / medians["off", 1],
              "second_with_to_without": medians["on", 2] / medians["off", 2]}
    if as_json:
        print(json.dumps({"rows": rows, "ratios": ratios}))
        return
    print(f"{'prefix cache':>12} {'question':>8} {'TTFT ms':>9} {'prompt':>7} {'cached':>7}")
    for row in rows:
        print(f"{row['prefix_cache']:>12} {row['question']:>8} {1e3 * row['ttft_s']:>9.1f} {row['prompt_tokens']:>7} "
              f"{row['cached_tokens']:>7}")
    print(f"second question to the first: {ratios['second_to_first']:.3f}, without prefix cache "
          f"{ratios['second_to_first_without']:.3f}; with it to without: {ratios['second_with_to_without']:.3f}")


if __name__ == "__main__":
    main()
