"""The prefix cache as a client sees it: fewer tokens computed, shown in the usage, and the same answers."""

import concurrent.futures

import pytest

from tests.e2e.answers.test_same_answers import reference
from tests.e2e.daemon import image_part, running, text_part
from tests.models import checkpoints


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint("qwen3_vl")


@pytest.fixture(scope="module")
def daemon(model):
    with running(model, encoder__workers=1, pd__max_batched_tokens=64) as daemon:
        yield daemon.ready()


def say(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True)


def ask(daemon, model, parts, images, **fields):
    """The usage of an answer, which must be the reference's."""
    answer = daemon.chat(parts, max_tokens=12, **fields)
    prompt_tokens, wanted, _, tokenizer = reference(model, parts, images, 12)
    for choice in answer["choices"]:
        assert choice["message"]["content"] == say(tokenizer, wanted)
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    return answer["usage"]


def test_a_second_question_computes_only_itself(daemon, model):
    images = [checkpoints.picture(200, 150, seed=seed) for seed in (1, 2)]
    about = [image_part(image) for image in images]
    first = ask(daemon, model, [*about, text_part("what is this?")], images)
    second = ask(daemon, model, [*about, text_part("how many are there?")], images)
    details = second["prompt_tokens_details"]
    assert first["prompt_tokens_details"]["cached_tokens"] < 8     # the template's beginning, at most
    assert details["image_tokens"] < details["cached_tokens"] < second["prompt_tokens"]
    swapped = ask(daemon, model, [*reversed(about), text_part("what is this?")], images[::-1])
    assert swapped["prompt_tokens_details"]["cached_tokens"] < 8
    daemon.at_rest()
    assert daemon.wait(lambda status: status["workers"][1]["kv_cached"])["workers"][1]["kv_used"] == 0


def test_the_same_picture_in_another_size_is_another(daemon, model):
    image = checkpoints.picture(180, 180, seed=5)
    parts = [image_part(image), text_part("describe it")]
    whole = ask(daemon, model, parts, [image])
    small = daemon.chat(parts, max_tokens=12, mm_processor_kwargs={"max_pixels": 28 * 28 * 16})["usage"]
    assert small["prompt_tokens"] < whole["prompt_tokens"] and small["prompt_tokens_details"]["cached_tokens"] < 8


def test_choices_cost_one_prefill_and_count_their_prompt_once(daemon, model):
    image = checkpoints.picture(300, 200, seed=6)
    usage = ask(daemon, model, [image_part(image), text_part("and this?")], [image], n=3)
    assert usage["prompt_tokens_details"]["cached_tokens"] < 8
    answers = [daemon.chat([image_part(image), text_part("say more")], n=3, temperature=1, seed=4)["choices"]
               for _ in range(2)]
    texts = [[choice["message"]["content"] for choice in choices] for choices in answers]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    assert [choice["index"] for choice in answers[0]] == [0, 1, 2]


def test_questions_and_pictures_in_any_order_never_mix(daemon, model):
    """Field case D30, many at once: equal sizes, so that prompts differ in nothing but the picture."""
    images = [checkpoints.picture(120, 120, seed=seed) for seed in range(20, 26)]
    asked = [(image, text) for text in ("what colour?", "what colour is it?") for image in images] * 2
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda one: ask(daemon, model, [image_part(one[0]), text_part(one[1])], [one[0]]), asked))
    daemon.at_rest()


def test_a_request_that_failed_leaves_the_next_one_whole(daemon, model):
    """Field case D31."""
    image = checkpoints.picture(220, 100, seed=31)
    status, _ = daemon.post({"messages": [{"role": "user", "content": [image_part(image), text_part("x " * 20_000)]}]})
    assert status == 400
    ask(daemon, model, [image_part(image), text_part("short")], [image])


def test_switched_off_nothing_is_cached(model):
    with running(model, encoder__workers=1, pd__prefix_cache="false") as daemon:
        daemon.ready()
        image = checkpoints.picture(100, 100, seed=1)
        for text in ("what is this?", "what is that?"):
            usage = ask(daemon, model, [image_part(image), text_part(text)], [image], n=2)
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
