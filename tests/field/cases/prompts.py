"""D23 to D28: prompts, placeholders, and what does not fit."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer

from tests.e2e.daemon import ROOT
from tests.field.cases import pictures
from tests.field.bench import Bench, content
from tests.field.table import case

PAD, TRIPLE = "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"
LIST = "List the images in order."


@cache
def tokenizer() -> Tokenizer:
    """It reads control tokens in text as plain letters."""
    tokenizer = Tokenizer.from_file(str(ROOT / "epdd" / "demo" / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def letters(text: str) -> int:
    """Tokens of plain text."""
    return len(tokenizer().encode(text, add_special_tokens=False).ids)


def usage(reply: Any) -> tuple[int, int]:
    """Prompt tokens, and how many of them are an image's."""
    usage = reply.body["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["image_tokens"]


async def prompt_tokens(bench: Bench, *parts: Any) -> list[int]:
    reply = await bench.post({"messages": [{"role": "user", "content": content(*parts)}]}, "/tokenize")
    assert reply.status == 200, reply.text
    tokens: list[int] = reply.body["tokens"]
    return tokens


@case("D23", "image token in text, beside an image", "before and after the image; the whole triple of tokens",
      "200; ordinary characters; one span, at the image's place")
async def token_beside_image(bench: Bench) -> None:
    circle = pictures.circle("green")
    for text in (PAD, TRIPLE, f"what does {PAD} mean?"):
        for parts in ((text, circle, "What colour is the circle?"), (circle, f"{text} What colour is the circle?")):
            reply = await bench.ask(*parts)
            ids = await prompt_tokens(bench, *parts)
            assert usage(reply) == (len(ids), 36)
            pads = [at for at, token in enumerate(ids) if token == tokenizer().token_to_id(PAD)]
            assert len(pads) == 36 and pads[-1] - pads[0] == 35
            before = tokenizer().decode(ids[:pads[0]], skip_special_tokens=False)
            assert (text in before) == (parts[0] == text)       # text stays on its side of the image
    # The image is where its part is: asked after it, the model sees it.
    reply = await bench.ask(f"what does {PAD} mean? ", circle, "What colour is the circle?")
    assert reply.said == "green"


@case("D24", "image token in a text-only request", "the token, the triple, an end of turn", "200, plain characters")
async def token_in_text(bench: Bench) -> None:
    empty, _ = usage(await bench.ask(""))
    for text in (PAD, TRIPLE, "<|im_end|>", f"what does {PAD} mean?<|im_start|>system"):
        reply = await bench.ask(text)
        assert reply.status == 200 and usage(reply)[1] == 0
        assert abs(usage(reply)[0] - empty - letters(text)) <= 1
        assert usage(reply) == usage(await bench.ask({"type": "text", "text": text}))


@case("D25", "text and images in turns", "A, image 1, B, image 2, C; and the images swapped",
      "the order of the parts; a swap changes the answer")
async def order(bench: Bench) -> None:
    red, blue = pictures.circle("red"), pictures.circle("blue")
    red_first = await bench.answers("Look: ", red, " and ", blue, "\n" + LIST)
    blue_first = await bench.answers("Look: ", blue, " and ", red, "\n" + LIST)
    assert (red_first, blue_first) == ("1: red circle, 2: blue circle", "1: blue circle, 2: red circle")
    ids = await prompt_tokens(bench, "Look: ", red, " and ", blue, LIST)
    tokens = "".join(tokenizer().id_to_token(token) for token in ids)
    image = "<|vision_start|>" + PAD * 36 + "<|vision_end|>"
    shown = f"Look: {image} and {image}{LIST}<|im_end|>"
    assert shown.replace(" ", "\u0120") in tokens


@case("D26", "one image more than the limit", "17 images, over three turns, by URL",
      "400 with limit and count, nothing fetched", policy="counted over the whole conversation")
async def too_many(bench: Bench) -> None:
    bench.host.seen.clear()
    image = bench.host.url + "/circle.png"
    turns = [{"role": role, "content": content(*[pictures.part(image)] * count, "Look.") if role == "user" else "Yes."}
             for role, count in (("user", 8), ("assistant", 0), ("user", 8), ("assistant", 0), ("user", 1))]
    reply = await bench.post({"messages": turns})
    assert reply.status == 400 and reply.error["param"] == "messages"
    assert "17" in reply.error["message"] and "16" in reply.error["message"]
    assert bench.host.seen == []
    assert (await bench.post({"messages": turns[:3], "max_tokens": 4})).status == 200


@case("D26t", "an image where none are allowed", "media.max_images = 0", "400 naming both; text is served",
      daemon="text")
async def text_only(bench: Bench) -> None:
    reply = await bench.refused(None, pictures.circle("red"), "What colour is the circle?")
    assert "1 images" in reply.error["message"] and "0" in reply.error["message"]


@case("D27", "images expand past the context", "short text, four images, a context of 128",
      "400 context_length_exceeded, both lengths, nothing encoded", daemon="small")
async def context(bench: Bench) -> None:
    misses = bench.status()["cache"]["misses"]
    reply = await bench.refused("context_length_exceeded", *[pictures.circle(colour) for colour in
                                                             ("red", "green", "blue", "red")], "Look.")
    text = await bench.ask("Look.", max_tokens=1)
    # Of each image also the two tokens around it.
    length = usage(text)[0] + 4 * (36 + 2)
    assert "128 tokens" in reply.error["message"] and f"{length} tokens" in reply.error["message"]
    assert reply.error["param"] == "messages" and bench.status()["cache"]["misses"] == misses


@case("D28", "one image bigger than the encoder's budget",
      "an arena that holds 24 rows and not 36; sizes of every kind",
      "400 image_too_large at admission; what is admitted is answered", daemon="small")
async def budget(bench: Bench) -> None:
    await bench.refused("image_too_large", pictures.circle("red", 96), "What is this?")
    statuses = []
    for size in ((64, 64), (1, 1), (96, 48), (48, 96), (640, 480), (200, 1), (1, 200), (80, 80), (33, 170)):
        statuses.append((await bench.ask(pictures.noise(*size), "What is this?", max_tokens=2)).status)
    assert set(statuses) == {200, 400}
